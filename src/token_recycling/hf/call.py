"""Calls of ``generate`` and ``stream``: checking of prompts and options, creation of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

import torch
from transformers import GenerationConfig

from token_recycling import defaults
from token_recycling.decoding.accept import Acceptor, FollowAcceptor, GreedyAcceptor
from token_recycling.decoding.loop import OnDraft
from token_recycling.decoding.metrics import Step
from token_recycling.decoding.samplers import RowSampler
from token_recycling.decoding.sequence import Sequence, StopRule, at_most, at_token
from token_recycling.decoding.text import Prompt, TextStream, encode
from token_recycling.errors import TokenRecyclingError, unknown_option
from token_recycling.hf.criteria import CriteriaRule
from token_recycling.hf.prepare import REFUSED, generate_options, mixes_prompts, request_for
from token_recycling.hf.request import Request
from token_recycling.model.base import OnProgress, Target
from token_recycling.model.limits import check_prompts

OnStep = Callable[[Step], None]


@dataclass(frozen=True)
class CallOptions:
    """The options of ``generate`` and ``stream`` that do not concern logits processors.

    Attributes:
        max_new_tokens: most new tokens per row.
        temperature: 0: greedy.
        seed: random seed; row b draws like a single prompt with ``seed`` + b. None: PyTorch's
            global random state.
        stop: strings that end a row.
        keep_context: reuse the keys and values of the beginning that the prompt has in common
            with the previous call.
        on_progress: called with (prompt tokens read, prompt tokens).
        on_step: called with every ``Step``, the prefill first.
        on_draft: called with (the drafter's state, ``DraftTree``, ``Accepted``) of every step.
    """

    max_new_tokens: int = defaults.MAX_NEW_TOKENS
    temperature: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] | None = None
    keep_context: bool = False
    on_progress: OnProgress | None = None
    on_step: OnStep | None = None
    on_draft: OnDraft | None = None

    def check(self) -> None:
        """Check the callbacks and the seed.

        Raises:
            TokenRecyclingError: a callback is not callable, or the seed is not an integer from 0 to
                2^63 - 1.
        """
        for name in ("on_step", "on_progress", "on_draft"):
            call = getattr(self, name)
            if call is not None and not callable(call):
                raise TokenRecyclingError(f"{name} is {call!r}; it must be a function")
        seed: Any = self.seed
        is_integer = isinstance(seed, Integral) and not isinstance(seed, bool)
        if seed is not None and not (is_integer and 0 <= int(seed) < 2**63):
            raise TokenRecyclingError(f"seed is {seed}; it must be an integer from 0 to 2^63 - 1")

    def stop_strings(self) -> list[str]:
        """Return the stop strings.

        Raises:
            TokenRecyclingError: one is empty or not a string.
        """
        strings: Any = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not isinstance(strings, list | tuple | set) or not all(
            isinstance(text, str) and text for text in strings
        ):
            raise TokenRecyclingError(
                f"stop is {self.stop!r}; it must be a non-empty string or a list of them"
            )
        return list(strings)


class GenerateArguments(TypedDict, total=False):
    """Arguments of ``generate`` and ``stream``, for type checkers and editors.

    The attributes of ``CallOptions``, then options of Transformers' ``generate``.
    """

    max_new_tokens: int
    temperature: float
    seed: int | None
    stop: str | Iterable[str] | None
    keep_context: bool
    on_progress: OnProgress | None
    on_step: OnStep | None
    on_draft: OnDraft | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    min_new_tokens: int | None
    min_length: int | None
    max_time: float | None
    bad_words_ids: list[list[int]] | None
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | list[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    sequence_bias: Any
    renormalize_logits: bool | None
    remove_invalid_values: bool | None
    guidance_scale: float | None
    logits_processor: Any
    prefix_allowed_tokens_fn: Any
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    generation_config: Any


@dataclass(frozen=True)
class Call:
    """A checked call.

    Attributes:
        options: the caller's options.
        sequences: one row per prompt.
        accept: chooses the tokens.
    """

    options: CallOptions
    sequences: list[Sequence]
    accept: Acceptor

    def on_step(self, step: Step) -> None:
        """Call the caller's ``on_step``, if given."""
        if self.options.on_step is not None:
            self.options.on_step(step)


def prepare_call(
    model: Any,
    tokenizer: Any,
    target: Target,
    prompts: list[Prompt],
    options: CallOptions,
    others: dict[str, Any],
    *,
    stream: bool,
    special_tokens: bool = False,
) -> Call:
    """Check a call and create its rows.

    Args:
        model: its ``generate`` prepares logits processors and stopping criteria.
        tokenizer: the model's tokenizer, or None.
        target: the model as the decoding loop uses it.
        prompts: strings, conversations or token ids.
        options: options of the call.
        others: options of Transformers' ``generate``, which create logits processors.
        stream: True when the text is needed token by token.
        special_tokens: True when that text must contain special tokens.

    Raises:
        TokenRecyclingError: a prompt or an option cannot be used.
    """
    if not prompts:
        raise TokenRecyclingError("the list of prompts is empty; give at least one")
    ours = GenerateArguments.__annotations__
    for name in others:
        if name in REFUSED:
            raise TokenRecyclingError(f"{name} is not supported here; {REFUSED[name]}")
        if name not in ours and name not in _known_to(model):
            raise unknown_option(name, ours)
    given = generate_options(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, **others
    )
    options.check()
    stop = options.stop_strings()
    if stop and tokenizer is None:
        raise TokenRecyclingError("stop strings need a tokenizer")
    encoded = [encode(tokenizer, prompt) for prompt in prompts]
    check_prompts(encoded, target.max_context)
    for prompt in encoded:
        if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            raise TokenRecyclingError(
                f"a token id of the prompt is not between 0 and {target.vocab_size - 1}"
            )
    requests = [request_for(model, tokenizer, prompt, given) for prompt in encoded]
    if reason := mixes_prompts(requests):
        raise TokenRecyclingError(f"these prompts cannot be one batch: {reason}; pass one per call")
    accept: Acceptor = GreedyAcceptor()
    if not all(request.is_plain_greedy for request in requests):
        sampler = None
        if options.temperature:
            sampler = RowSampler(_generators(options.seed, len(encoded), target.device))
        accept = FollowAcceptor([request.processors for request in requests], sampler)
    added = tokenizer.get_added_vocab() if stop else {}
    special = {added[text] for text in stop if text in added}  # which the text omits
    sequences = []
    for prompt, request in zip(encoded, requests):
        text = None
        if stream or stop:
            text = TextStream(tokenizer, stop, special_tokens=special_tokens)
        rules = _rules(request, target, given["max_new_tokens"], special)
        longest = len(prompt) + given["max_new_tokens"]
        sequences.append(Sequence(prompt, rules, text=text, longest=longest))
    return Call(options, sequences, accept)


def _known_to(model: Any) -> set[str]:
    """Return the names of the options of the model's ``generate`` and ``forward``."""
    both = (type(model).generate, model.forward)
    parameters = (name for method in both for name in inspect.signature(method).parameters)
    return {*vars(GenerationConfig()), *parameters}


def _rules(
    request: Request, target: Target, max_new_tokens: int, special: set[int]
) -> list[StopRule]:
    """Return the stop rules of a row: our own and the criteria of the request."""

    def within_context(row: Sequence) -> str | None:  # the model may change before it decodes
        most = target.max_context
        return "length" if most is not None and len(row.tokens) >= most else None

    rules: list[StopRule] = [
        at_most(max_new_tokens),
        within_context,
        CriteriaRule(request.criteria, target.device),
    ]
    return [*rules, at_token(special)] if special else rules


def _generators(seed: int | None, rows: int, device: torch.device) -> list[torch.Generator | None]:
    """Return a generator per row; row b draws like a single prompt with ``seed`` + b."""
    if seed is None and rows == 1:
        return [None]
    first = int(torch.randint(2**62, (), device="cpu")) if seed is None else int(seed)
    return [torch.Generator(device).manual_seed(first + row) for row in range(rows)]

"""Serve a prepared ``generate`` call, with draft trees or by stock decoding.

``generate`` prepares everything (processors, criteria, padding, cache) and then calls a decoding
method. A recycler is such a method; it forwards calls that it cannot serve to the method that
``generate`` would have called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.utils import GENERATION_MODES_MAPPING

from skinny_kernels.modes import RestoredModes, ordinary_tensors
from token_recycling.decoding.accept import Acceptor, FollowAcceptor, GreedyAcceptor
from token_recycling.decoding.samplers import BatchSampler, RowSampler
from token_recycling.decoding.sequence import Sequence
from token_recycling.errors import PlainDecodingWarning, TokenRecyclingError, warn_caller
from token_recycling.hf.cache_interop import from_dynamic, read_padding, to_dynamic
from token_recycling.hf.criteria import BatchCriteria, CriteriaRule, looks_at_batch
from token_recycling.hf.eligibility import why_unservable
from token_recycling.hf.request import DecodingMethod, Request
from token_recycling.model.base import Target
from token_recycling.model.cache_name import CACHE_NAME, cache_in
from token_recycling.model.override import Override, is_covered
from token_recycling.model.target import TreeTarget
from token_recycling.options import Options
from token_recycling.util.lock import FairLock


class _Recycler(Protocol):
    """What serving a call needs of a ``TokenRecycling`` object."""

    model: Any
    target: Target
    lock: FairLock
    options: Options
    session: Any
    warned: set[str]

    def check_model(self) -> str | None: ...


EXTRACT = "_extract_generation_mode_kwargs"


def patch_generate(model: Any, recycler: Any) -> None:
    """Make ``generate`` pass ``streamer``, ``tokenizer`` and similar arguments to a recycler.

    Transformers (at least 4.57 to 5.24) collects them but, if ``custom_generate`` is a callable,
    replaces them with the callable's own arguments. The patched method of this model object keeps
    them for our decoding methods, until ``unpatch_generate`` was called for all of them.
    """
    if not is_covered(model, EXTRACT):
        override = Override(model, EXTRACT, _extract)
        override.users = WeakSet()
        setattr(model, EXTRACT, override)
    model.__dict__[EXTRACT].users.add(recycler)


def unpatch_generate(model: Any, recycler: Any) -> None:
    """Undo ``patch_generate`` for a recycler, which then cannot be a ``custom_generate``."""
    if is_covered(model, EXTRACT):
        users = model.__dict__[EXTRACT].users
        users.discard(recycler)
        if not users:
            del model.__dict__[EXTRACT]


def _extract(
    model: Any,
    stock: Callable[..., dict[str, Any]],
    custom_generate: Any,
    kwargs: dict[str, Any],
    *others: Any,
) -> dict[str, Any]:
    if not isinstance(custom_generate, DecodingMethod):
        return stock(custom_generate, kwargs, *others)
    mode_kwargs = stock(None, kwargs, *others)
    mode_kwargs["own_cache"] = cache_in(kwargs) is not None
    return mode_kwargs


@contextmanager
def streamer_ended(streamer: Any) -> Iterator[None]:
    """End the streamer if decoding raises, since its reader would wait forever."""
    try:
        yield
    except BaseException as error:
        if streamer is not None and getattr(error, "ended", None) is not streamer:
            with suppress(Exception):
                error.ended = streamer  # type: ignore[attr-defined]
                streamer.end()
        raise


def serve(
    recycler: _Recycler, request: Request, streamer: Any, inputs_tensor: Tensor | None
) -> Any:
    """Serve a prepared ``generate`` call: recycled if possible, else by stock decoding.

    Returns:
        What ``GenerationMixin._sample`` returns.

    Raises:
        TokenRecyclingError: the call cannot be recycled and the recycler is strict, or its
            decoding method is only on the Hugging Face Hub.
    """
    target = recycler.target
    with RestoredModes(), streamer_ended(streamer):
        if "/" in GENERATION_MODES_MAPPING[request.mode]:
            mode = request.mode.value.replace("_", " ")
            raise TokenRecyclingError(
                f"{mode} is on the Hugging Face Hub; call generate without custom_generate"
            )
        if isinstance(target, TreeTarget):
            with recycler.lock.acquired(wait=recycler.options.queue) as acquired:
                reason: str | None = "the model is still generating another answer"
                if acquired:
                    reason = recycler.check_model() or why_unservable(
                        request, target.max_positions, target.vocab_size
                    )
                    if reason is None:
                        return _recycle(recycler, target, request, streamer)
            assert reason is not None
            warn_plain(recycler, reason)
        target.lm_head.refresh()
        with target.lm_head:
            return _stock(recycler.model, request, streamer, inputs_tensor)


def warn_plain(recycler: _Recycler, reason: str) -> None:
    """Warn once per reason, or raise if the recycler is strict."""
    message = f"Token Recycling does not support this generate call: {reason}"
    if recycler.options.strict:
        raise TokenRecyclingError(message)
    if reason not in recycler.warned:
        recycler.warned.add(reason)
        warn_caller(f"{message}; falling back to standard decoding", PlainDecodingWarning)


def _stock(model: Any, request: Request, streamer: Any, inputs_tensor: Tensor | None) -> Any:
    """Call the decoding method that ``generate`` would have called."""
    method = getattr(type(model), GENERATION_MODES_MAPPING[request.mode])
    inputs = dict(request.inputs)
    if "inputs_tensor" in inspect.signature(method).parameters:
        inputs["inputs_tensor"] = inputs_tensor
    return method(
        model,
        request.input_ids,
        logits_processor=request.processors,
        stopping_criteria=request.criteria,
        generation_config=request.config,
        synced_gpus=request.synced_gpus,
        streamer=streamer,
        **inputs,
    )


class _Scores:
    """Raw logits and processed scores of every token of a single row, if requested."""

    def __init__(self, request: Request) -> None:
        self.scores: tuple[Tensor, ...] | None = () if request.returns("output_scores") else None
        self.logits: tuple[Tensor, ...] | None = () if request.returns("output_logits") else None
        self.device = request.input_ids.device

    @property
    def requested(self) -> bool:
        return self.scores is not None or self.logits is not None

    def record(self, row: int, logits: Tensor, scores: Tensor) -> None:
        if self.scores is not None:
            self.scores += (scores.to(self.device),)
        if self.logits is not None:
            self.logits += (logits.to(self.device),)


class _Output:
    """The new tokens of a batch, padded and streamed as if rows advanced in lockstep."""

    def __init__(self, request: Request, streamer: Any) -> None:
        self.input_ids, self.streamer = request.input_ids, streamer
        pad = request.config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.sequences: list[Sequence] = []
        self.released = [0] * request.batch  # number of final new tokens of each row
        self.ended = [False] * request.batch
        self._streamed = 0

    def release(self, row: int, ends: bool) -> None:
        """Mark the next token of a row as final, and stream completed columns."""
        self.released[row] += 1
        self.ended[row] |= ends
        while self.streamer is not None and self._next_is_known():
            column = torch.tensor(self._column(self._streamed), device="cpu")
            self.streamer.put(column)
            self._streamed += 1

    def _next_is_known(self) -> bool:
        known = [count > self._streamed for count in self.released]
        return any(known) and all(k or ended for k, ended in zip(known, self.ended))

    def _column(self, at: int) -> list[int]:
        return [
            sequence.tokens[sequence.prompt_length + at] if at < count else self.pad
            for sequence, count in zip(self.sequences, self.released)
        ]

    def new_tokens(self) -> list[list[int]]:
        """Return each row's final new tokens."""
        return [
            sequence.new_tokens[:count] for sequence, count in zip(self.sequences, self.released)
        ]

    def ids(self) -> Tensor:
        """Return prompts and new tokens as int64 [B, t], padded on both sides."""
        columns = [self._column(at) for at in range(max(self.released))]
        new = torch.tensor(columns, device=self.input_ids.device).T
        ids = torch.cat([self.input_ids, new], dim=1)
        for row, sequence in enumerate(self.sequences):  # processors may have written to them
            seen = sequence.as_seen()[: self.input_ids.shape[1] + self.released[row]]
            ids[row, : len(seen)] = torch.tensor(seen, device=ids.device)
        return ids


def _recycle(
    recycler: _Recycler, target: TreeTarget, request: Request, streamer: Any
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode with draft trees, using what ``generate`` has prepared for the call."""
    config = request.config
    scores, output = _Scores(request), _Output(request, streamer)
    across = list(filter(looks_at_batch, request.criteria)) if request.batch > 1 else []
    sampler: RowSampler | BatchSampler | None = None
    if config.do_sample:
        sampler = BatchSampler(request.batch, ahead=bool(across))
        # Code of the caller may draw from the same generator after every token.
        if request.batch == 1 and all(map(_is_stock, (streamer, *request.criteria))):
            sampler = RowSampler([None])  # can be part of a graph
    accept: Acceptor = GreedyAcceptor()
    if not request.is_plain_greedy or scores.requested:
        processors = [request.row_processors(row) for row in range(request.batch)]
        accept = FollowAcceptor(processors, sampler, scores.record if scores.requested else None)
    _make_sequences(request, across, scores, output)
    if request.cached:
        target.cache = from_dynamic(request.cache, len(target.cache.layers), target.dtype)
        output.sequences[0].cached = request.cached
    for _ in recycler.session.decode(output.sequences, accept):
        pass
    if across:  # rows may have continued past their ends
        lengths = zip(output.sequences, output.released)
        target.cache.rewind([sequence.prompt_length + count - 1 for sequence, count in lengths])
        if isinstance(sampler, BatchSampler):
            sampler.rewind(max(output.released), target.device)
    if streamer is not None:
        streamer.end()
    cache = None
    if config.return_dict_in_generate or request.own_cache:
        cache = request.cache if request.own_cache else DynamicCache()
        read_padding(target, output.new_tokens(), output.pad)
        to_dynamic(target.cache, cache)
    if not config.return_dict_in_generate:
        return output.ids()
    return GenerateDecoderOnlyOutput(
        sequences=output.ids(),
        scores=scores.scores,
        logits=scores.logits,
        **{CACHE_NAME: cache},
    )


def _is_stock(value: Any) -> bool:
    """Return True for nothing, and for an object of Transformers' own classes."""
    return value is None or type(value).__module__.startswith("transformers.")


def _make_sequences(request: Request, across: list[Any], scores: _Scores, output: _Output) -> None:
    """Create the rows of ``output`` with the call's stopping criteria."""
    row_rule = CriteriaRule(
        [criterion for criterion in request.criteria if criterion not in across],
        request.input_ids.device,
        lambda: scores.scores,
    )
    pad = output.pad if request.ends_rows else None
    batch = BatchCriteria(
        row_rule,
        across,
        request.input_ids,
        pad,
        output.sequences,
        output.released,
        output.release,
    )

    def on_append(row: int, sequence: Sequence) -> None:
        with ordinary_tensors():  # streamers are user code
            output.release(row, not sequence.active)

    for row, (ids, prompt) in enumerate(zip(request.rows(), request.prompts())):
        sequence = Sequence(
            prompt,
            [batch.rule(row) if across else row_rule],
            padding=ids[: max(0, len(ids) - len(prompt))],
            unknown=max(0, len(prompt) - len(ids)),
            on_append=None if across else partial(on_append, row),
            given=request.input_ids[row : row + 1],
            longest=row_rule.most_tokens,
        )
        output.sequences.append(sequence)

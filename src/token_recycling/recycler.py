"""``TokenRecycling``: a model, its tokenizer and what was learnt so far."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from token_recycling import defaults
from token_recycling.accept import Acceptor, FollowAcceptor, GreedyAcceptor
from token_recycling.answers import Chunk, Generation
from token_recycling.checkpoint import load_checkpoint
from token_recycling.decode import Decoding, Hooks, OnDraft
from token_recycling.draft_size.auto import AutoSize
from token_recycling.draft_size.base import DraftSize, FixedSize
from token_recycling.draft_size.costs import find
from token_recycling.drafters import AnyDrafter, NoDrafter, make_drafter
from token_recycling.drafters.legacy import adapted
from token_recycling.errors import TokenRecyclingError
from token_recycling.graph.decoder import GraphDecoder, GraphError, can_capture
from token_recycling.hf_generate.criteria import CriteriaRule
from token_recycling.hf_generate.prepare import (
    REFUSED,
    generate_options,
    mixes_prompts,
    prepare,
)
from token_recycling.hf_generate.request import DecodingMethod, Request
from token_recycling.hf_generate.serve import patch_generate, serve
from token_recycling.lock import FairLock
from token_recycling.matrix import AdjacencyMatrix, fingerprint
from token_recycling.metrics import Stats, Step
from token_recycling.model.fallback import PlainTarget
from token_recycling.model.limits import check_prompts
from token_recycling.model.prefix_cache import PrefixCache
from token_recycling.model.probe import open_target
from token_recycling.model.target import OnProgress, TreeTarget
from token_recycling.model.unwrap import model_inside
from token_recycling.modes import ordinary_tensors
from token_recycling.options import Options
from token_recycling.samplers import RowSampler
from token_recycling.sequence import Sequence, StopRule, at_most, at_token
from token_recycling.text import Prompt, TextStream, encode, is_batch
from token_recycling.tree import TreeTemplate

Steps = Generator[Step, None, None]
OnStep = Callable[[Step], None]


def _ignore(step: Step) -> None:
    """Do nothing."""


class TokenRecycling(DecodingMethod):
    """A model that decodes several tokens per forward, without a change in any of them.

    The adjacency matrix in ``matrix`` is kept from call to call (hot start); ``reset`` empties it.
    One answer at a time: calls from other threads wait, and continuing a stream after another
    answer has begun raises. A copy or a pickle is independent: it has what was learnt, and no
    context.

    Attributes:
        model: the Transformers model.
        tokenizer: its tokenizer, or None.
        target: the model as the decoding loop sees it.
        matrix: the adjacency matrix.
        drafter: what proposes drafts.
        draft_size: how many of their nodes are verified.
        template: the tree that was asked for.
        stats: of all answers, added up.
        warned: why calls of ``generate`` were decoded plainly.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **options: Any) -> None:
        """Wrap a model that is already loaded.

        Args:
            model: a Transformers ``…ForCausalLM``, or an object around one: a pipeline, a model of
                peft, … Its ``generate`` learns to pass streamers and tokenizers to
                ``custom_generate``, and some of its linear layers compute differently in a
                recycler's forwards; for everybody else it stays as it was.
            tokenizer: its tokenizer; without one, prompts are token ids and answers have no text.
            **options: see ``options.Options``.

        Raises:
            TokenRecyclingError: an option, the drafter, the tree or the matrix cannot be used.
            TypeError: there is no such option.
        """
        self.options = given = Options.of(options)
        self.model, self.tokenizer = model_inside(model), tokenizer
        matrix = _given_matrix(given)
        k = matrix.k if matrix else defaults.CANDIDATES if given.k is None else given.k
        self.template = _ranked(k) if given.automatic else _template(given.tree, k)
        self.target = open_target(
            self.model, strict=given.strict, float32_logits=given.float32_logits
        )
        name = fingerprint(tokenizer, self.target.vocab_size)
        with ordinary_tensors():  # the caller may be in inference mode, and later not
            if matrix is None:
                matrix = AdjacencyMatrix(self.target.vocab_size, k, fingerprint=name)
            matrix.check(self.target.vocab_size, name, what="this model")
            self.matrix = matrix.to(self.target.device)
            self.drafter, self.draft_size = self._drafter_and_size()
        # Entered while a graph is compiled, which takes a minute or more the first time.
        self.compiling: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.stats = Stats()
        self.warned: set[str] = set()
        self.lock = FairLock()
        self._graph: GraphDecoder | None = None
        self._prefix: PrefixCache | None = None
        self._runs = 0  # begun so far; only the last one may continue
        patch_generate(self.model)

    def _drafter_and_size(self) -> tuple[AnyDrafter, DraftSize]:
        given, device = self.options, self.target.device
        if isinstance(self.target, PlainTarget):
            return NoDrafter(), FixedSize()
        if not isinstance(given.drafter, str):
            return adapted(given.drafter), FixedSize()
        drafter = make_drafter(given.drafter, self.matrix, self.template)
        if not (given.automatic and drafter.acceptance):
            return drafter, FixedSize()
        costs = given.costs or find(self.model, device)
        return drafter, AutoSize(drafter.acceptance, costs, device)

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins without a context and without graphs."""
        return {**self.__dict__, "_graph": None, "_prefix": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        patch_generate(self.model)

    @property
    def strict(self) -> bool:
        """See ``Options``."""
        return self.options.strict

    @property
    def queue(self) -> bool:
        """See ``Options``."""
        return self.options.queue

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **options: Any,
    ) -> TokenRecycling:
        """Load a model and its tokenizer.

        Args:
            name_or_path: a checkpoint; None: the small model that comes with the package.
            device: where to put it; None: an accelerator if there is one. Leave it out with
                ``device_map``.
            dtype: None: float32 on a CPU and for the bundled model, else the checkpoint's own.
            **options: those of ``options.Options``. All others are passed to
                ``AutoModelForCausalLM.from_pretrained`` as they are: ``device_map``,
                ``quantization_config``, ``attn_implementation``, …

        Raises:
            TokenRecyclingError: the checkpoint cannot be loaded, or see ``__init__``.
        """
        own = {name: options.pop(name) for name in Options.names() & options.keys()}
        model, tokenizer = load_checkpoint(name_or_path, device, dtype, **options)
        return cls(model, tokenizer, **own)

    def reset(self) -> None:
        """Forget everything learnt (cold start), and the context."""
        self.matrix.reset()
        self.forget_context()

    def forget_context(self) -> None:
        """Free the KV cache; an unfinished answer cannot continue."""
        self.target.reset()
        self._prefix = None
        self._runs += 1

    def generate(
        self, prompt: Prompt | Iterable[Prompt], **options: Any
    ) -> Generation | list[Generation]:
        """Answer a prompt, or a list of prompts as one batch.

        Args:
            prompt: a text, a conversation (list of messages), token ids, or a list of these.
            **options: those of ``stream``.

        Returns:
            A ``Generation``, or a list of them for a list of prompts.

        Raises:
            TokenRecyclingError: a prompt or an option cannot be used.
        """
        batch = is_batch(prompt)
        prompts: Any = list(prompt) if batch else [prompt]
        sequences, steps, on_step = self._start(prompts, stream=False, **options)
        with self._locked(), closing(steps):
            for step in steps:
                on_step(step)
        answers = [self._generation(sequence) for sequence in sequences]
        return answers if batch else answers[0]

    def _generation(self, sequence: Sequence) -> Generation:
        tokens = sequence.new_tokens
        if sequence.text is not None:
            sequence.text.finish()
            text = sequence.text.text
        elif self.tokenizer is None:
            text = ""
        else:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Generation(text, tokens, sequence.finish_reason or "", sequence.stats)

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
        """Answer a prompt token by token.

        The caller may stop iterating at any time: matrix and context stay valid.

        Args:
            prompt: a text, a conversation (list of messages) or token ids.
            **options: ``max_new_tokens`` (default 256); ``temperature`` (default 0: greedy),
                ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and any other option of
                ``generate`` that makes a logits processor, each with the meaning and the default
                that it has there; ``seed`` (None: PyTorch's own random state); ``stop``, a list
                of strings; ``keep_context``, to reuse the keys and values of the tokens that
                this prompt has in common with the previous call; ``on_progress``, called with
                (prompt tokens read, prompt tokens); ``on_step``, called with every ``Step``, the
                prefill first; ``on_draft``, called with (drafter rows, ``DraftTree``,
                ``Accepted``) of every step.

        Yields:
            One ``Chunk`` per token.

        Raises:
            TokenRecyclingError: the prompt or an option cannot be used.
        """
        (sequence,), steps, on_step = self._start([prompt], stream=True, **options)
        return self._chunks(sequence, steps, on_step)

    def _chunks(self, sequence: Sequence, steps: Steps, on_step: OnStep) -> Iterator[Chunk]:
        assert sequence.text is not None
        with closing(steps):  # at once, not when the garbage is collected
            while True:
                begin = len(sequence.new_tokens)
                with self._locked():
                    step = next(steps, None)
                if step is None:
                    return
                on_step(step)
                reason = sequence.finish_reason
                if reason is not None:
                    sequence.text.finish()
                tokens = sequence.new_tokens
                for index in range(begin, len(tokens)):
                    last = index == len(tokens) - 1
                    yield Chunk(
                        sequence.text.pieces[index],
                        tokens[index],
                        from_draft=begin > 0 and not last,
                        finish_reason=reason if last else None,
                        stats=sequence.stats if last and reason is not None else None,
                    )

    def _start(
        self,
        prompts: list[Prompt],
        *,
        stream: bool,
        max_new_tokens: int = defaults.MAX_NEW_TOKENS,
        temperature: float = 0.0,
        seed: int | None = None,
        stop: str | Iterable[str] | None = None,
        keep_context: bool = False,
        on_progress: OnProgress | None = None,
        on_step: OnStep | None = None,
        on_draft: OnDraft | None = None,
        **processors: Any,
    ) -> tuple[list[Sequence], Steps, OnStep]:
        """Check everything; return the rows, the generator of their steps, and ``on_step``."""
        if not prompts:
            raise TokenRecyclingError("there is no prompt")
        for name in REFUSED.keys() & processors.keys():
            raise TokenRecyclingError(f"{name} is no option here; {REFUSED[name]}")
        given = generate_options(
            max_new_tokens=max_new_tokens, temperature=temperature, **processors
        )
        stop = _stop_strings(stop)
        seed = _seed(seed)
        for name, call in (
            ("on_step", on_step),
            ("on_progress", on_progress),
            ("on_draft", on_draft),
        ):
            if call is not None and not callable(call):
                raise TokenRecyclingError(f"{name} is {call!r}; it must be a function")
        if stop and self.tokenizer is None:
            raise TokenRecyclingError("stop strings need a tokenizer")
        encoded = [encode(self.tokenizer, prompt) for prompt in prompts]
        self._check_ids(encoded)
        requests = [prepare(self.model, self.tokenizer, prompt, given) for prompt in encoded]
        if reason := mixes_prompts(requests):
            raise TokenRecyclingError(f"this call cannot be recycled: {reason}; use one prompt")
        accept: Acceptor = GreedyAcceptor()
        if not all(request.is_plain_greedy for request in requests):
            sampler = RowSampler(self._generators(seed, len(encoded))) if temperature else None
            accept = FollowAcceptor([request.processors for request in requests], sampler)
        sequences = [
            self._sequence(prompt, request, given["max_new_tokens"], stop, stream)
            for prompt, request in zip(encoded, requests)
        ]
        steps = self.steps(
            sequences,
            accept,
            keep_context=keep_context,
            on_progress=on_progress,
            on_draft=on_draft,
        )
        return sequences, self._remembering(sequences, steps), on_step or _ignore

    def _sequence(
        self, prompt: list[int], request: Request, most: int, stop: list[str], stream: bool
    ) -> Sequence:
        """Return the row of a prompt, which ends by our own rules and those of the request."""
        context = self.target.max_context
        limit = most if context is None else min(most, context - len(prompt))
        rules: list[StopRule] = [at_most(limit), CriteriaRule(request.criteria, self.target.device)]
        if special := self._special_ids(stop):
            rules.append(at_token(special))
        text = TextStream(self.tokenizer, stop) if stream or stop else None
        return Sequence(prompt, rules, text=text)

    def steps(
        self,
        sequences: list[Sequence],
        accept: Acceptor,
        *,
        keep_context: bool = False,
        on_progress: OnProgress | None = None,
        on_draft: OnDraft | None = None,
    ) -> Steps:
        """Decode rows with an acceptor of the caller's (see ``Decoding``); their stats are kept.

        Nothing happens before the first step is asked for.

        Args:
            sequences: the rows; where the target has read the beginning of a single row already,
                its ``cached`` says how much.
            accept: chooses tokens.
            keep_context: see ``stream``.
            on_progress: see ``stream``.
            on_draft: see ``stream``.

        Raises:
            TokenRecyclingError: a prompt cannot be read, or another answer was begun meanwhile.
        """
        self._runs += 1
        own = self._runs

        def check() -> None:
            if self._runs != own:
                raise TokenRecyclingError(
                    "this answer cannot go on: the model has begun another one, or was reset"
                )

        if keep_context and len(sequences) == 1 and self._prefix is not None:
            sequences[0].cached = self._prefix.common(sequences[0].tokens[:-1])
        self._prefix = None
        graph = self._graph_decoder(accept) if on_draft is None else None
        hooks = Hooks(check, on_progress, on_draft)
        decoding = Decoding(
            self.target, self.drafter, self.draft_size, accept, sequences, graph, hooks
        )
        with closing(decoding.steps()) as steps:
            for step in steps:
                for row, sequence in enumerate(sequences):
                    read = sequence.prompt_length - sequence.cached
                    for stats in (sequence.stats, self.stats):
                        stats.add(step, row, prompt_tokens=read)
                yield step

    def _remembering(self, sequences: list[Sequence], steps: Steps) -> Steps:
        """Note at the end what the target has read of a single row, for ``keep_context``."""
        run = self._runs + 1
        with suppress(GeneratorExit), closing(steps):  # a stream that nobody continues
            yield from steps
        first = sequences[0]
        known = len(sequences) == 1 and bool(first.new_tokens)
        if known and self._runs == run and isinstance(self.target, TreeTarget):
            self._prefix = PrefixCache(self.target, first.tokens[:-1])

    def _graph_decoder(self, accept: Acceptor) -> GraphDecoder | None:
        """Return what takes the steps with ``accept``, or None: the eager loop."""
        wanted = self.options.graph
        if wanted is None:
            wanted = self.target.device.type == "cuda"
        if not (wanted and can_capture(accept) and isinstance(self.target, TreeTarget)):
            return None
        if self._graph is None or self._graph.drafter is not self.drafter:
            size = self.draft_size.for_graph()
            try:
                self._graph = GraphDecoder(self.target, self.drafter, size, self.compiling)
            except GraphError:
                return None
        return self._graph

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
            TokenRecyclingError: the model is answering, in this thread or while there is no queue.
        """
        with self.lock.acquired(wait=self.queue) as mine:
            if not mine:
                raise TokenRecyclingError("the model is in the middle of another answer")
            yield

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        **prepared: Any,
    ) -> Any:
        """Serve ``model.generate(…, custom_generate=recycler)``; ``generate`` calls this.

        Returns:
            What ``generate`` returns without ``custom_generate``.

        Raises:
            TokenRecyclingError: the model is not the recycler's, or the call cannot be served
                and ``strict`` is set.
        """
        if model is not self.model:
            raise TokenRecyclingError("this recycler was made for another model object")
        return serve(self, Request.of_call(input_ids, **prepared), streamer, inputs_tensor)

    def _special_ids(self, stop: list[str]) -> set[int]:
        """Ids of the stop strings that are special tokens; the text does not show those."""
        added = self.tokenizer.get_added_vocab() if stop else {}
        return {added[text] for text in stop if text in added}

    def _generators(self, seed: int | None, rows: int) -> list[torch.Generator | None]:
        """Row b of a batch draws as a single prompt with seed + b does."""
        if seed is None and rows == 1:
            return [None]
        if seed is None:
            seed = int(torch.randint(2**62, ()))
        device = self.target.device
        return [torch.Generator(device).manual_seed(seed + row) for row in range(rows)]

    def _check_ids(self, prompts: list[list[int]]) -> None:
        check_prompts(prompts, self.target.max_context)
        for prompt in prompts:
            if not 0 <= min(prompt) <= max(prompt) < self.target.vocab_size:
                raise TokenRecyclingError(
                    f"token ids must lie between 0 and {self.target.vocab_size - 1}"
                )


def _seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise TokenRecyclingError(f"seed is {seed}; it must be a whole number below 2^63")
    return int(seed)


def _stop_strings(stop: Any) -> list[str]:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, list | tuple | set) or not all(
        isinstance(text, str) and text for text in strings
    ):
        raise TokenRecyclingError(
            f"stop is {stop!r}; it must be a text that is not empty, or a list"
        )
    return list(strings)


def _given_matrix(given: Options) -> AdjacencyMatrix | None:
    """Return the matrix to start from, if one is given."""
    matrix = given.matrix
    if not isinstance(given.drafter, str):
        matrix = getattr(given.drafter, "matrix", None) or matrix
    if isinstance(matrix, str | Path):
        with ordinary_tensors():
            matrix = AdjacencyMatrix.load(matrix)
    if matrix is not None and given.k is not None and given.k != matrix.k:
        raise TokenRecyclingError(f"the matrix keeps k={matrix.k} candidates, not {given.k}")
    return matrix


def _template(tree: Any, k: int) -> TreeTemplate:
    if not isinstance(tree, TreeTemplate):
        return TreeTemplate.load(tree, k)
    tree.check_k(k)
    return tree


def _ranked(k: int) -> TreeTemplate:
    """The tree whose size an automatic one is chosen from."""
    ranked = TreeTemplate.load("ranked", k)
    return replace(ranked.first(min(defaults.MOST_NODES, len(ranked.paths))), name=defaults.TREE)

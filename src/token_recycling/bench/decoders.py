"""Benchmark decoders: one variant each, with the answers it gives and their timings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from token_recycling.bench.compare import plain_generate, timed
from token_recycling.bench.variants import Variant
from token_recycling.decoding.metrics import PHASES, Step
from token_recycling.drafting.prompt_lookup import LOOKUP_TOKENS
from token_recycling.drafting.size.auto import AutoSize
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.recycler import TokenRecycling


@dataclass
class Turn:
    """An answer to one turn of a question.

    Attributes:
        token_ids: emitted tokens.
        text: the decoded ``token_ids``.
        seconds: time of the whole call including prefill.
        first_seconds: time to the first token.
        accept_lengths: tokens emitted by each forward pass after prefill; for
            ``model.generate``, by each forward pass.
        sizes: tokens verified by each of these forward passes; empty for ``model.generate`` with
            prompt lookup, which does not report the length of its drafts.
        phases: seconds by phase.
    """

    token_ids: list[int]
    text: str = ""
    seconds: float = 0.0
    first_seconds: float = 0.0
    accept_lengths: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        return asdict(self)


class Decoder:
    """A variant with its recycler, which shares the model with all other variants."""

    def __init__(self, variant: Variant, first: TokenRecycling, max_new_tokens: int) -> None:
        """Create a decoder on the model of ``first``.

        Raises:
            TokenRecyclingError: the variant's tree or k cannot be used.
        """
        self.variant = variant
        self.recycler = first if variant.drafter is None else _recycler(variant, first)
        self.options: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        if variant.temperature:
            self.options["temperature"] = variant.temperature

    @property
    def auto_size(self) -> AutoSize | None:
        """The draft-size policy, if drafts are sized automatically."""
        size = self.recycler.draft_size
        return size if self.variant.drafter and isinstance(size, AutoSize) else None

    @property
    def size(self) -> int | None:
        """Maximum number of tokens verified per step; None if not fixed or nothing is recycled."""
        if not self.variant.recycles or self.auto_size:
            return None
        if self.variant.nodes is not None:
            return self.variant.nodes + 1
        return None if self.recycler.template is None else self.recycler.template.size

    def answer(self, prompt: list[int], seed: int) -> Turn:
        """Decode ``prompt``; ``seed`` is used when sampling.

        Raises:
            TokenRecyclingError: the prompt does not fit, or ``model.generate`` fails.
        """
        options = {**self.options, "seed": seed} if self.variant.temperature else self.options
        by_generate = self.variant.drafter is None
        turn = self._generate(prompt, options) if by_generate else self._recycle(prompt, options)
        tokenizer = self.recycler.tokenizer
        if tokenizer is not None:
            turn.text = tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        self.recycler.forget_context()
        return turn

    def _generate(self, prompt: list[int], options: dict[str, Any]) -> Turn:
        clock = _Clock()
        options = {**options, "streamer": clock}
        if self.variant.lookup:
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        begin = perf_counter()
        try:
            tokens, seconds = timed(
                lambda: plain_generate(self.recycler, prompt, options), self.recycler.target.device
            )
        except TokenRecyclingError:
            raise
        except Exception as error:  # depends on the model and the options
            line = one_line(error, 200)
            raise TokenRecyclingError(
                f"{self.variant.name} fails with this model: {line}"
            ) from error
        sizes = [] if self.variant.lookup else [1] * len(clock.counts)
        return Turn(tokens, "", seconds, clock.first - begin, clock.counts, sizes)

    def _recycle(self, prompt: list[int], options: dict[str, Any]) -> Turn:
        steps: list[Step] = []
        ends: list[float] = []

        def note(step: Step) -> None:
            steps.append(step)
            ends.append(perf_counter())

        begin = perf_counter()
        answer, seconds = timed(
            lambda: self.recycler.generate(prompt, on_step=note, **options),
            self.recycler.target.device,
        )
        return Turn(
            answer.token_ids,
            "",
            seconds,
            ends[0] - begin,
            [len(step.tokens[0]) for step in steps[1:]],
            [step.size for step in steps[1:]],
            {phase: sum(s.seconds[i] for s in steps[1:]) for i, phase in enumerate(PHASES)},
        )

    def state(self) -> dict[str, Tensor]:
        """Return what matrix and draft-size policy have learned from text; timings are excluded."""
        if self.variant.drafter is None:
            return {}
        return self.recycler.matrix.state() | self.recycler.draft_size.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the result of ``state``."""
        if not state:
            return
        self.recycler.matrix.restore(state)
        self.recycler.draft_size.restore(state)


def _recycler(variant: Variant, first: TokenRecycling) -> TokenRecycling:
    options = {**vars(variant.options()), "float32_logits": first.options.float32_logits}
    return TokenRecycling(first.model, first.tokenizer, **options)


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Records when ``model.generate`` emits its first token, and how many each forward emits."""

    def __init__(self) -> None:
        self.first = 0.0
        self.counts: list[int] = []
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        if not self._prompt_came:  # generate passes the prompt first
            self._prompt_came = True
            return
        self.first = self.first or perf_counter()
        self.counts.append(value.numel())

    def end(self) -> None:
        pass

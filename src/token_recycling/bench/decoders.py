"""Benchmark decoders: one variant each, with the answers it gives and their timings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from token_recycling.bench.compare import StepClock, plain_generate, timed
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
        seed: of the random numbers.
        accept_lengths: tokens emitted by each forward pass after the prompt's.
        sizes: tokens verified by each of these forward passes; empty for ``model.generate`` with
            prompt lookup, which does not report the length of its drafts.
        step_seconds: time of each of these steps.
        phases: seconds by phase.
    """

    token_ids: list[int]
    text: str = ""
    seconds: float = 0.0
    first_seconds: float = 0.0
    seed: int = 0
    accept_lengths: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON types."""
        return asdict(self)


class Decoder:
    """A variant with its recycler, which shares the model with all other variants."""

    def __init__(self, variant: Variant, first: TokenRecycling, options: dict[str, Any]) -> None:
        """Create a decoder on the model of ``first``.

        Args:
            variant: which one.
            first: of the model.
            options: of every call: ``max_new_tokens``, and for sampling ``temperature``, ``top_p``.

        Raises:
            TokenRecyclingError: the variant's tree or k cannot be used.
        """
        self.variant = variant
        self.recycler = first if variant.drafter is None else _recycler(variant, first)
        self.options = dict(options)
        self.initial = self.state() if variant.cold else {}  # from which every question starts

    @property
    def auto_size(self) -> AutoSize | None:
        """The draft-size policy, if drafts are sized automatically."""
        size = self.recycler.draft_size
        return size if self.variant.drafter and isinstance(size, AutoSize) else None

    @property
    def size(self) -> int | None:
        """Maximum number of tokens verified per step; None if not fixed or nothing is recycled."""
        return (
            self.recycler.session.largest_draft
            if self.variant.recycles and not self.auto_size
            else None
        )

    def answer(self, prompt: list[int], seed: int) -> Turn:
        """Decode ``prompt``; ``seed`` is used when sampling.

        Raises:
            TokenRecyclingError: the prompt does not fit, or ``model.generate`` fails.
        """
        options = {**self.options, "seed": seed}
        by_generate = self.variant.drafter is None
        turn = self._generate(prompt, options) if by_generate else self._recycle(prompt, options)
        turn.seed, tokenizer = seed, self.recycler.tokenizer
        if tokenizer is not None:
            turn.text = tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        self.recycler.forget_context()
        return turn

    def _generate(self, prompt: list[int], options: dict[str, Any]) -> Turn:
        clock = StepClock()
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
        sizes = [] if self.variant.lookup else [1] * len(clock.lengths)
        return _turn(tokens, seconds, begin, clock, sizes)

    def _recycle(self, prompt: list[int], options: dict[str, Any]) -> Turn:
        clock = StepClock()
        phases = dict.fromkeys(PHASES, 0.0)

        def note(step: Step) -> None:
            clock.note(step)
            if not step.is_prefill:
                for phase, spent in zip(PHASES, step.seconds):
                    phases[phase] += spent

        begin = perf_counter()
        answer, seconds = timed(
            lambda: self.recycler.generate(prompt, on_step=note, **options),
            self.recycler.target.device,
        )
        turn = _turn(answer.token_ids, seconds, begin, clock, clock.sizes)
        turn.phases = phases
        return turn

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


def _turn(
    tokens: list[int], seconds: float, begin: float, clock: StepClock, sizes: list[int]
) -> Turn:
    return Turn(
        tokens,
        seconds=seconds,
        first_seconds=clock.first - begin,
        accept_lengths=clock.lengths,
        sizes=sizes,
        step_seconds=clock.seconds,
    )

"""Benchmark decoders: one variant each, with the answers it gives and their timings."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from torch import Tensor

from skinny_kernels.errors import one_line
from token_recycling.bench.compare import StepClock, plain_generate, timed
from token_recycling.bench.variants import Variant
from token_recycling.drafting.prompt_lookup import LOOKUP_TOKENS
from token_recycling.drafting.size.auto import AutoSize
from token_recycling.errors import TokenRecyclingError
from token_recycling.recycler import TokenRecycling


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
        self.variant, self.options = variant, options
        self.recycler = first if variant.drafter is None else _recycler(variant, first)
        self.initial = self.state() if variant.cold else {}  # from which every question starts

    @property
    def size(self) -> int | None:
        """Maximum number of tokens verified per step; None if not fixed or nothing is recycled."""
        fixed = self.variant.recycles and not isinstance(self.recycler.draft_size, AutoSize)
        return self.recycler.session.largest_draft if fixed else None

    def answer(self, prompt: list[int], seed: int) -> dict[str, Any]:
        """Decode ``prompt``; ``seed`` is used when sampling.

        Returns:
            A turn of a record: the emitted ``token_ids`` and their ``text``; ``seconds`` of the
            whole call, prefill included, and ``first_seconds`` to the first token; the ``seed``; of
            each forward pass after the prompt's, tokens emitted (``accept_lengths``), tokens
            verified (``sizes``; none for prompt lookup of ``model.generate``, which does not report
            the length of its drafts) and time (``step_seconds``); seconds by phase (``phases``).

        Raises:
            TokenRecyclingError: the prompt does not fit, or ``model.generate`` fails.
        """
        clock, options = StepClock(), {**self.options, "seed": seed}
        decode = self._generate if self.variant.drafter is None else self._recycle
        device, begin = self.recycler.target.device, perf_counter()
        (tokens, phases), seconds = timed(lambda: decode(prompt, options, clock), device)
        tokenizer = self.recycler.tokenizer
        text = "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
        self.recycler.forget_context()
        return {
            "token_ids": tokens,
            "text": text,
            "seconds": seconds,
            "first_seconds": clock.first - begin,
            "seed": seed,
            "accept_lengths": clock.lengths,
            "sizes": clock.sizes,
            "step_seconds": clock.seconds,
            "phases": phases,
        }

    def _generate(
        self, prompt: list[int], options: dict[str, Any], clock: StepClock
    ) -> tuple[list[int], dict[str, float]]:
        options["streamer"] = clock
        if self.variant.lookup:
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        try:
            tokens = plain_generate(self.recycler, prompt, options)
        except TokenRecyclingError:
            raise
        except Exception as error:  # depends on the model and the options
            line = one_line(error, 200)
            raise TokenRecyclingError(
                f"{self.variant.name} fails with this model: {line}"
            ) from error
        clock.sizes = [] if self.variant.lookup else [1] * len(clock.lengths)
        return tokens, {}

    def _recycle(
        self, prompt: list[int], options: dict[str, Any], clock: StepClock
    ) -> tuple[list[int], dict[str, float]]:
        answer = self.recycler.generate(prompt, on_step=clock.note, **options)
        return answer.token_ids, answer.stats.seconds

    def state(self) -> dict[str, Tensor]:
        """Return what matrix and draft-size policy have learned from text; timings are excluded."""
        if self.variant.drafter is None:
            return {}
        return self.recycler.matrix.state() | self.recycler.draft_size.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore the result of ``state``."""
        if state:
            self.recycler.matrix.restore(state)
            self.recycler.draft_size.restore(state)


def _recycler(variant: Variant, first: TokenRecycling) -> TokenRecycling:
    options = {**vars(variant.options()), "float32_logits": first.options.float32_logits}
    return TokenRecycling(first.model, first.tokenizer, **options)

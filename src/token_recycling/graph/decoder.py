"""Decoding by captured steps; on a GPU the host is one step behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from time import perf_counter

import torch

from skinny_kernels.modes import ordinary_tensors
from token_recycling.decoding.accept import Acceptor, append_emitted
from token_recycling.decoding.metrics import Step
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.size.base import DraftSize
from token_recycling.errors import GraphError, TokenRecyclingError, warn_caller
from token_recycling.graph.captured_step import CapturedStep
from token_recycling.graph.chooser import TokenChoice
from token_recycling.graph.pool import StepPool, padded_rows
from token_recycling.model.target import TreeTarget
from token_recycling.util.tokens import NO_TOKEN

# Tokens that an answer must still be allowed to have, so that to capture another step pays: that
# takes as long as some 50 steps.
WORTH_CAPTURE = 128


def ended() -> Sequence:
    """Return a row that only pads a step."""
    sequence = Sequence([0])
    sequence.finish_reason = "length"
    return sequence


def can_capture(accept: Acceptor) -> bool:
    """Return whether a captured step can choose the tokens of ``accept``."""
    return TokenChoice.of(accept) is not None


class GraphDecoder:
    """Decodes with captured steps of one target and drafter.

    Attributes:
        pool: the steps.
    """

    def __init__(self, target: TreeTarget, drafter: AnyDrafter, draft_size: DraftSize) -> None:
        """Decode with ``drafter``.

        Args:
            target: the model.
            drafter: of any kind.
            draft_size: draft-size policy. Each size is a step of its own, so all drafts have one,
                which is looked at when an answer begins.

        Raises:
            GraphError: the model cannot be captured, or the drafter never drafts.
        """
        self.pool = StepPool(target, drafter)
        self.target, self.drafter, self.draft_size = target, drafter, draft_size
        with ordinary_tensors():
            self._full_size = drafter.full_size
        if self._full_size == 1 and not isinstance(drafter, NoDrafter):
            raise GraphError(f"the drafter {drafter.name} drafts nothing below a text of one token")
        self._captured_size = 0  # nodes, root included; chosen when an answer begins

    @property
    def next_size(self) -> int:
        """Tokens that the next step should verify, including the root."""
        return self._captured_size if self.draft_size.pays and not self.pool.pending else 1

    def _choose_size(self, rows: int) -> None:
        """Look at the draft-size policy before an answer of so many rows."""
        self.draft_size.begin(rows)
        # A drafter may propose fewer nodes than it is asked for.
        size = self.draft_size.typical(self._captured_size) or self._full_size
        self._captured_size = min(size, self._full_size)

    def warm(self, rows: Iterable[int], sizes: Iterable[int], seconds: float) -> None:
        """Wait for kernels, and capture the steps with which answers will begin.

        The target's context is dropped.

        Args:
            rows: numbers of rows that will be decoded together.
            sizes: tokens that steps verify per row; none: the size with which answers begin.
            seconds: that kernels are waited for at most; until they are there, steps are plain.

        Raises:
            GraphError: a step cannot be captured.
        """
        self.pool.wait(seconds)
        self.pool.wait_for_steps()
        given = tuple(sizes)
        for count in rows:
            sequences = [Sequence([0, 0]) for _ in range(padded_rows(count))]
            self._choose_size(len(sequences))
            try:
                self.target.prefill([[0]] * count)
                for size in given or (self.next_size,):
                    self.pool.get(sequences, [], size, TokenChoice())
            finally:
                self.target.reset()

    def steps(
        self, sequences: list[Sequence], accept: Acceptor, check: Callable[[], None]
    ) -> Iterator[Step]:
        """Decode with captured steps until the rows end or these cannot continue.

        Rows that are still active afterwards are left to the eager loop. Meanwhile the committed
        keys and values are in the step's own cache. They are copied back to the target at the
        end, or when the consumer stops early. The whole time of a step counts as verification.

        Args:
            sequences: the rows; the last token of each has not been read yet.
            accept: the acceptor that chose the first tokens; must satisfy ``can_capture``.
            check: raises when the target has been used for something else.
        """
        rows = len(sequences)
        choice = TokenChoice.of(accept)
        assert choice is not None
        if not choice.is_argmax:
            padded = sequences  # a row that is not there has no processors
        else:
            padded = [*sequences, *(ended() for _ in range(padded_rows(rows) - rows))]
        generators = choice.generators(self.target.device)
        self._choose_size(len(padded))
        while any(sequence.active for sequence in sequences):
            self.pool.wait_for_steps()  # before the size is looked at, which depends on kernels
            try:
                captured = self.pool.get(padded, generators, self.next_size, choice)
            except GraphError as reason:
                warn_caller(f"decoding without a graph: {reason}")
                return  # Python shows a repeated warning once
            if not (yield from self._run(captured, padded, rows, generators, check)):
                return

    def _continues(self, captured: CapturedStep, sequences: list[Sequence]) -> bool:
        """Return whether this step is still the one for these rows."""
        spec = captured.step.spec
        if spec.drafts == "none" and not isinstance(self.drafter, NoDrafter):
            # It was to bridge the time until kernels are compiled.
            left = [(one.longest or len(one.tokens)) - len(one.tokens) for one in sequences]
            return self.pool.pending or max(left) < WORTH_CAPTURE
        return spec.size == self.next_size

    def _run(
        self,
        captured: CapturedStep,
        padded: list[Sequence],
        rows: int,
        generators: list[torch.Generator],
        check: Callable[[], None],
    ) -> Generator[Step, None, bool]:
        """Decode until all rows have ended, the cache is full, or the draft size changes.

        Args:
            captured: takes the steps.
            padded: the rows, and behind them those that only pad the step.
            rows: number of the former.
            generators: see ``StepPool.get``.
            check: see ``steps``.

        Returns:
            True if another captured step can go on; False if a forward overflowed, so that the
            eager loop must.
        """
        cache, step = self.target.cache, captured.step
        sequences = padded[:rows]
        first = [len(sequence.tokens) for sequence in padded]

        def emitted() -> list[int]:
            return [len(sequence.tokens) - start for sequence, start in zip(padded, first)]

        on_device = list(first)  # lengths on the device, where ended rows may have continued
        with ordinary_tensors():
            step.begin(padded, generators)
        in_flight: deque[Callable[[], list[list[int]]]] = deque()
        begun = perf_counter()
        overflowed = False
        try:
            while any(sequence.active for sequence in sequences):
                check()
                unknown = step.most * len(in_flight)  # upper bound of tokens in flight
                fits = max(on_device) + unknown + step.size <= step.cache.slots
                launches = fits and self._continues(captured, sequences)
                if launches:
                    step.chooser.draw([count + unknown + step.most for count in emitted()])
                    in_flight.append(captured.launch([sequence.active for sequence in padded]))
                elif not in_flight:
                    return True
                if launches and len(in_flight) <= captured.lag:
                    continue
                output = in_flight.popleft()()[:rows]
                active = [sequence.active for sequence in sequences]
                appended = append_emitted(output, sequences)
                overflowed = any(on and not new for on, new in zip(active, appended.tokens))
                if overflowed:
                    return False
                for row, (_, *chosen) in enumerate(output):
                    on_device[row] += sum(token != NO_TOKEN for token in chosen)
                seconds = (0.0, perf_counter() - begun, 0.0, 0.0, 0.0)
                done = Step(*appended, step.size, seconds)
                count = len(padded)  # what a step costs, it costs for these
                self.draft_size.record(
                    count, count * (step.size - 1), done.mean_emitted, sum(seconds)
                )
                # Whoever takes the step may draw from the same generators: for them these are where
                # plain sampling would have left them.
                step.chooser.rewind(emitted())
                yield done
                step.chooser.resume()
                begun = perf_counter()
        finally:
            try:
                check()
            except TokenRecyclingError:
                pass  # cache and random state may belong to another answer
            else:
                step.chooser.rewind(emitted())
                with self.target.inference_context():
                    step.drafting.end()
                    step.cache.store(cache, [len(sequence.tokens) - 1 for sequence in sequences])
            if overflowed:
                with self.target.inference_context():
                    step.cache.clear()
        return True

"""The automatic draft-size policy: one size per machine and kind of text, changed rarely."""

from __future__ import annotations

from math import exp

import numpy as np
import torch
from torch import Tensor

from token_recycling.draft_size.base import DraftSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.draft_size.timer import StepTimer
from token_recycling.errors import TokenRecyclingError
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree

REVIEW, PROBE = 16, 8  # steps between decisions; steps with drafts after a cooldown
GAIN = 1.03  # ratio of expected speeds above which the size changes
WATCH = 4  # one draft in so many is grown beyond the size, to see what larger ones promise
AHEAD = 2  # by so many sizes
MEMORY = 32.0  # watched drafts after which the weight of an old one is 1/e
PRIOR = 0.5  # weight of the expected probabilities, in watched drafts
KEPT = 4.0  # tokens that count as promised and come before the first step
# Another size is measured in so many steps in a row; steps between two measurements, for a size
# whose cost is not known yet and for others.
TRIAL, OFTEN, SELDOM = 4, 24, 96
HOPELESS = 0.8  # plain decoding is not measured below this fraction of the best expected speed
# Plain steps while drafts do not pay: initial and largest number; every failed probe doubles it.
COOLDOWN, LONGEST_COOLDOWN = 32, 512
FADED = 0.25  # weight that remains of older drafts when a probe begins


class AutoSize(DraftSize):
    """Verifies the first n nodes of every draft; n has the most expected tokens per second.

    Expected tokens are the mean sum of the drafts' scores or, without scores, of the drafter's
    acceptance probabilities, times the ratio of tokens that came to tokens that were promised.
    Costs come from a curve, corrected by the measured time of steps (``StepTimer``). The size is
    reviewed every ``REVIEW`` steps and changes only for a clear gain: changing it at every step
    costs more time than it saves, and smaller drafts teach the drafter less. Where plain decoding
    is faster than every draft, drafts pause, and are tried again after ever longer cooldowns.
    """

    def __init__(
        self,
        acceptance: tuple[float, ...],
        costs: CostCurve,
        *,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        """Choose sizes by ``costs``.

        Args:
            acceptance: acceptance probabilities (see ``Drafter.acceptance``).
            costs: step cost by tokens verified.
            sizes: the sizes to choose from, ascending from 1; None: those of ``costs``, up to the
                largest draft.

        Raises:
            TokenRecyclingError: ``acceptance`` is empty, so drafts cannot be truncated.
        """
        if not acceptance:
            raise TokenRecyclingError(
                "drafts of this drafter cannot be truncated; choose a fixed tree"
            )
        self.costs, self._acceptance = costs, np.array(acceptance)
        most = len(acceptance) + 1
        self.sizes = list(sizes or sorted({most, *(n for n in costs.sizes if n < most)}))
        self._ends = np.array(self.sizes) - 2  # index of each size's last node below the root
        self._context = 0.0
        self._steps, self._reviewed = 0, 0  # steps so far; step of the last review
        # Decayed sums over watched drafts: tokens promised per size, and drafts.
        self._promised = np.zeros(len(self.sizes))
        self._watched = 0.0
        # Decayed sums over steps: drafted tokens that came, and that were promised.
        self._came = self._said = 0.0
        self._timers: dict[int, StepTimer] = {}  # by rows of the batch
        self._use_rows(1)
        self._used = self._last = self._usual  # indices of the sizes of the last two steps
        self._cooldown, self._plain_left = COOLDOWN, 0
        self._trial, self._trial_left = 0, 0  # index of the size being measured, and steps to go
        self._measured, self._turn = 0, 0  # step of the last measurement; number of reviews

    @property
    def size(self) -> int:
        """The current draft size, including the root; 1 during a cooldown."""
        return 1 if self._plain_left else self.sizes[self._usual]

    @property
    def pays(self) -> bool:  # type: ignore[override]
        """False while drafts pause."""
        return not self._plain_left

    def for_graph(self) -> DraftSize:
        """Return a policy that chooses between the current size and plain decoding."""
        size = self.sizes[self._usual]
        return AutoSize(tuple(self._acceptance), self.costs, sizes=tuple(sorted({1, size})))

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt from texts."""
        sums = [*self._promised, self._watched, self._came, self._said]
        return {"tokens": torch.tensor(sums, dtype=torch.float64, device="cpu")}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a ``state``."""
        *promised, self._watched, self._came, self._said = state["tokens"].tolist()
        self._promised = np.array(promised)
        self._usual = self._fastest(self.speeds()[1])

    def begin(self, sequences: list[Sequence]) -> None:
        """Start with new texts; another number of rows starts with its own best size."""
        self._context = float(max(len(sequence.tokens) for sequence in sequences))
        if len(sequences) != self._batch:
            self._use_rows(len(sequences))

    def _use_rows(self, batch: int) -> None:
        """Take the best size for steps of ``batch`` rows, whose costs are measured separately."""
        self._batch = batch
        self._usual = self._fastest(self.speeds()[1])
        if batch not in self._timers:
            timer = StepTimer(len(self.sizes), self._usual, trusted=self.costs.measured)
            self._timers[batch] = timer

    def limit(self) -> int:
        """Return the nodes to grow in the next step."""
        self._steps += 1
        if self._plain_left:
            return 1
        if self._trial_left:
            return self.sizes[self._trial]
        if self._steps % WATCH == 0:
            return self.sizes[min(self._usual + AHEAD, len(self.sizes) - 1)]
        return self.sizes[self._usual]

    def choose(self, draft: DraftTree, sequences: list[Sequence]) -> int:
        """Return the current size, or the one that is being measured."""
        if draft.nodes == 1:
            self._used = 0
            return 1
        self._used = self._trial if self._trial_left else max(self._usual, 1)
        sums = np.cumsum(self._scores(draft))
        self._said = (1 - 1 / MEMORY / WATCH) * self._said
        self._came = (1 - 1 / MEMORY / WATCH) * self._came
        self._said += sums[min(self._ends[self._used], len(sums) - 1)]
        if self._steps % WATCH == 0 and not self._trial_left:
            # Sizes beyond the draft are promised no more than all of it.
            offered = sums[np.minimum(self._ends, len(sums) - 1)]
            offered[0] = 0.0
            self._promised = (1 - 1 / MEMORY) * self._promised + offered
            self._watched = (1 - 1 / MEMORY) * self._watched + 1
        return self.sizes[self._used]

    def _scores(self, draft: DraftTree) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return the mean score of each node below the root over the rows, float64 [n - 1]."""
        valid = draft.valid[:, 1:].numpy()
        if draft.scores is None:
            scores = self._acceptance[: draft.nodes - 1] * valid
        else:
            scores = draft.scores[:, 1:].numpy() * valid
        mean: np.ndarray[tuple[int], np.dtype[np.float64]] = scores.mean(axis=0)
        return mean

    def record(self, step: Step, sequences: list[Sequence]) -> None:
        """Update step costs and tokens from a step; review the size when due."""
        counts = [len(tokens) for tokens in step.tokens]
        mean = sum(counts) / max(sum(map(bool, counts)), 1)
        self._context += mean
        expected = self.costs.at(len(counts) * step.nodes, self._context)
        if self._used == self._last:  # the first step of another size takes longer
            usual = not self._trial_left
            self._timers[self._batch].record(self._used, sum(step.seconds), expected, usual=usual)
        self._last = self._used
        if self._used:
            self._came += mean - 1
        if self._plain_left:
            self._plain_left -= 1
            if not self._plain_left:
                self._begin_probe()
            return
        if self._trial_left:
            self._trial_left -= 1
        elif self._steps - self._reviewed >= REVIEW:
            self._reviewed = self._steps
            self._review()

    def speeds(self) -> tuple[list[float], list[float]]:
        """Return, per size, the expected MAT and the expected tokens per unit of cost."""
        ends = np.minimum(self._ends, len(self._acceptance) - 1)
        prior = np.cumsum(self._acceptance)[ends]
        prior[0] = 0.0
        promised = (self._promised + PRIOR * prior) / (self._watched + PRIOR)
        ratio = (self._came + KEPT) / (self._said + KEPT)
        mats = 1.0 + ratio * promised
        prices = [self.costs.at(self._batch * n, self._context) for n in self.sizes]
        if timer := self._timers.get(self._batch):
            prices = [price * exp(timer.correction(i)) for i, price in enumerate(prices)]
        return mats.tolist(), (mats / np.array(prices)).tolist()

    def _fastest(self, speeds: list[float]) -> int:
        """Return the index of the fastest size; of about equal ones the largest."""
        best = max(speeds)
        return max(i for i, speed in enumerate(speeds) if speed > 0.99 * best)

    def _review(self) -> None:
        """Change the size for a clear gain, pause drafts, or begin to measure another size."""
        _, speeds = self.speeds()
        best = self._fastest(speeds)
        faster = speeds[best] > GAIN * speeds[self._usual]
        if faster and self._trial == best and self._steps - self._measured <= 2 * REVIEW:
            if best == 0:
                self._plain_left = self._cooldown
                self._cooldown = min(2 * self._cooldown, LONGEST_COOLDOWN)
                return
            self._usual, self._cooldown = best, COOLDOWN
        elif faster:
            self._measure(best)
        else:
            self._explore(speeds)

    def _explore(self, speeds: list[float]) -> None:
        """Measure a neighbour of the current size, or plain decoding, if it is due."""
        timer = self._timers[self._batch]
        self._turn += 1
        others = (self._usual - 1, self._usual + 1) if self._turn % 2 else (self._usual + 1, 0)
        there = [i for i in others if 0 <= i < len(self.sizes) and i != self._usual]
        for other in sorted(there, key=timer.is_known):  # unknown ones first
            interval = SELDOM if timer.is_known(other) else OFTEN
            promising = other > 0 or speeds[0] > HOPELESS * max(speeds)
            if promising and self._steps - self._measured >= interval:
                self._measure(other)
                return

    def _measure(self, size: int, steps: int = TRIAL) -> None:
        """Take the size of this index in the next steps."""
        self._trial, self._trial_left, self._measured = size, steps, self._steps

    def _begin_probe(self) -> None:
        """Try drafts again after a cooldown; what they promised before counts little."""
        self._promised *= FADED
        self._watched *= FADED
        self._came *= FADED
        self._said *= FADED
        self._usual = max(self._fastest([0.0, *self.speeds()[1][1:]]), 1)
        self._measure(self._usual, PROBE)
        self._reviewed = self._steps - REVIEW + PROBE

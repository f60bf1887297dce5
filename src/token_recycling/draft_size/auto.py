"""The automatic draft-size policy: one size per machine and kind of text, changed rarely."""

from __future__ import annotations

from math import exp, log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

from token_recycling.draft_size.base import DraftSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.draft_size.gate import SpeculationGate
from token_recycling.draft_size.timer import StepTimer
from token_recycling.errors import TokenRecyclingError
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree

REVIEW, PROBE = 16, 16  # steps between decisions; steps with drafts after a cooldown
GAIN = 1.02  # ratio of expected speeds above which the size changes
EQUAL = 0.98  # speeds above this fraction of the best one are about equal
# A draft of twice the size is worth so much more than its own tokens: every node that is verified,
# rejected ones too, teaches the drafter.
TEACHES = 0.02
# Of the first drafts every one, later one in so many is watched: it is grown beyond the size by so
# many sizes, to see what it promises.
EARLY, WATCH, AHEAD = 32, 4, 2
MEMORY = 32.0  # watched drafts after which the weight of an old one is 1/e
PRIOR = 0.5  # weight of the expected probabilities, in watched drafts
KEPT = 4.0  # tokens that count as promised and come before the first step
# Another size is measured in so many steps in a row; steps between two measurements, for a size
# whose cost is not known yet and for others.
TRIAL, OFTEN, SELDOM = 4, 32, 192
# Plain decoding is measured rarely while it is below this fraction of the best expected speed.
HOPELESS, RARELY = 0.5, 1024
# Plain steps while drafts do not pay: initial and largest number; every failed probe doubles it.
COOLDOWN, LONGEST_COOLDOWN = 32, 512
FADED = 0.25  # weight that remains of older drafts when a probe begins


class AutoSize(DraftSize):
    """Verifies the first n nodes of every draft; n has the most expected tokens per second.

    Expected tokens are the mean sum of the drafts' scores or, without scores, of the drafter's
    acceptance probabilities, times the ratio of tokens that came to tokens that were promised.
    Sizes beyond a draft are promised more in proportion to the acceptance probabilities.
    Costs come from a curve, corrected by the measured time of steps (``StepTimer``). The size is
    reviewed every ``REVIEW`` steps and changes only for a clear gain: changing it at every step
    costs more time than it saves, and smaller drafts teach the drafter less. Where plain decoding
    is faster than every draft, drafts pause, and are tried again after ever longer cooldowns.
    """

    def __init__(self, acceptance: tuple[float, ...], costs: CostCurve) -> None:
        """Choose sizes by ``costs``.

        Args:
            acceptance: acceptance probabilities (see ``Drafter.acceptance``).
            costs: step cost by tokens verified.

        Raises:
            TokenRecyclingError: ``acceptance`` is empty, so drafts cannot be truncated.
        """
        if not acceptance:
            raise TokenRecyclingError(
                "drafts of this drafter cannot be truncated; choose a fixed tree"
            )
        self.costs, self._acceptance = costs, np.array(acceptance)
        most = len(acceptance) + 1
        self.sizes = sorted({1, most, *(size for size in costs.sizes if size < most)})
        self._ends = np.array(self.sizes) - 2  # index of each size's last node below the root
        # Drafted tokens that are expected to come, by nodes below the root and by size.
        self._expected_of = np.cumsum(self._acceptance)
        self._expected = self._expected_of[self._ends]
        self._expected[0] = 0.0
        self._context = 0.0
        self._steps, self._reviewed = 0, 0  # steps so far; step of the last review
        # Decayed sums over watched drafts: tokens promised per size, and drafts.
        self._promised = np.zeros(len(self.sizes))
        self._watched = 0.0
        # Decayed sums over watched drafts: tokens that came, and that were promised.
        self._came = self._said = 0.0
        self._timers: dict[int, StepTimer] = {}  # by rows of the batch
        self._cooldown, self._plain_left = COOLDOWN, 0
        self._probing = False  # the next review ends a probe
        self._trial, self._trial_left = 0, 0  # index of the size being measured, and steps to go
        self._measured, self._turn = 0, 0  # step of the last measurement; number of measurements
        self._plain_measured = 0  # step of the last measurement of plain decoding
        self._use_rows(1)
        self._used = self._last = self._usual  # indices of the sizes of the last two steps

    @property
    def size(self) -> int:
        """The current draft size, including the root; 1 during a cooldown."""
        return 1 if self._plain_left else self.sizes[self._usual]

    @property
    def pays(self) -> bool:  # type: ignore[override]
        """False while drafts pause."""
        return not self._plain_left

    def for_graph(self) -> DraftSize:
        """Return a speculation gate between the current size and plain decoding."""
        return SpeculationGate(self.size, self.costs)

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt from texts."""
        sums = [*self._promised, self._watched, self._came, self._said]
        return {"tokens": torch.tensor(sums, dtype=torch.float64, device="cpu")}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a ``state``."""
        *promised, self._watched, self._came, self._said = state["tokens"].tolist()
        self._promised = np.array(promised)
        self._take_best()

    def begin(self, sequences: list[Sequence]) -> None:
        """Start with new texts; another number of rows starts with its own best size."""
        self._context = float(max(len(sequence.tokens) for sequence in sequences))
        if len(sequences) != self._batch:
            self._use_rows(len(sequences))

    def _use_rows(self, batch: int) -> None:
        """Take the best size for steps of ``batch`` rows, whose costs are measured separately."""
        self._batch = batch
        self._take_best()
        if batch not in self._timers:
            timer = StepTimer(len(self.sizes), self._usual, trusted=self.costs.measured)
            self._timers[batch] = timer

    def _take_best(self) -> None:
        """Take the best size by what is known; pause if that is plain decoding.

        A pause or a probe goes on: on a busy server, rows join and leave more often than these
        last, and what is known would never change.
        """
        speeds = self.speeds()[1]
        self._usual = self._fastest(speeds, least=1)
        if self._fastest(speeds) > 0:
            self._plain_left = 0
        elif not (self._plain_left or self._probing):
            self._plain_left = COOLDOWN

    def limit(self) -> int:
        """Return the nodes to grow in the next step."""
        if self._plain_left:
            return 1
        if self._trial_left and not self._probing:
            return self.sizes[self._trial]
        if self._is_watched():
            return self.sizes[min(self._usual + AHEAD, len(self.sizes) - 1)]
        return self.sizes[self._usual]

    def _is_watched(self) -> bool:
        if self._probing or self._trial_left:
            return self._probing or self._trial > self._usual
        return self._steps < EARLY or self._steps % WATCH == 0

    def choose(self, draft: DraftTree, sequences: list[Sequence]) -> int:
        """Return the current size, or the one that is being measured."""
        if draft.nodes == 1:
            self._used = 0
            return 1
        self._used = self._trial if self._trial_left else self._usual
        if self._is_watched():
            self._watch(np.cumsum(self._scores(draft, [one.active for one in sequences])))
        return self.sizes[self._used]

    def _watch(self, sums: Any) -> None:
        """Add the tokens that a draft of n nodes promises, cumulative float64 [n - 1]."""
        offered = sums[np.minimum(self._ends, len(sums) - 1)]
        offered[0] = 0.0
        kept = 1 - 1 / MEMORY
        if len(sums) > 1 and sums[-1] > sums[-2]:  # it would have had more nodes
            beyond = self._expected / self._expected_of[len(sums) - 1]
            offered *= np.maximum(beyond, 1.0)
        self._promised = kept * self._promised + offered
        self._watched = kept * self._watched + 1

    def _scores(self, draft: DraftTree, active: list[bool]) -> Any:
        """Return the mean score of each node below the root over the active rows: [n - 1]."""
        # NumPy selects and multiplies a few numbers in a tenth of PyTorch's time.
        rows = np.array(active)
        scores = self._acceptance[: draft.nodes - 1]
        if draft.scores is not None:
            scores = draft.scores.numpy()[rows, 1:]
        return (scores * draft.valid.numpy()[rows, 1:]).mean(axis=0)

    def record(self, step: Step, sequences: list[Sequence]) -> None:
        """Update step costs and tokens from a step; review the size when due."""
        counts = [len(tokens) for tokens in step.tokens]
        mean = sum(counts) / max(sum(map(bool, counts)), 1)
        self._context += mean
        if self._used and self._watched:
            kept = 1 - 1 / MEMORY / WATCH
            self._said = kept * self._said + self._promised[self._used] / self._watched
            self._came = kept * self._came + mean - 1
        # A watched draft takes longer, and so does the first step of another size.
        timed = self._trial_left or self._steps % WATCH == WATCH // 2
        self._steps += 1
        if timed and self._used == self._last:
            usual, seconds = not self._trial_left, sum(step.seconds)
            expected = self.costs.at(len(counts) * step.nodes, self._context)
            self._timers[self._batch].record(self._used, seconds, expected, usual=usual)
        self._last = self._used
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
        promised = (self._promised + PRIOR * self._expected) / (self._watched + PRIOR)
        ratio = (self._came + KEPT) / (self._said + KEPT)
        mats = 1.0 + ratio * promised
        prices = [self.costs.at(self._batch * n, self._context) for n in self.sizes]
        if timer := self._timers.get(self._batch):
            prices = [price * exp(timer.correction(i)) for i, price in enumerate(prices)]
        return mats.tolist(), (mats / np.array(prices)).tolist()

    def _fastest(self, speeds: list[float], least: int = 0) -> int:
        """Return the index, from ``least`` on, of the best size; 0 if plain decoding is fastest.

        Of about equal ones it is the middle one, the smaller of two: costs and promises are
        estimates, and the middle of a plateau is the farthest from sizes that are slower.
        """
        if max(speeds[1:]) < speeds[0] and least == 0:
            return 0
        values = self._values(speeds)
        # Sizes that are slower than plain decoding are left out if others are not.
        kept = [i for i in range(1, len(speeds)) if speeds[i] >= speeds[0]] or range(1, len(speeds))
        best = max(values[i] for i in kept)
        equal = [i for i in kept if values[i] > EQUAL * best]
        return equal[(len(equal) - 1) // 2]

    def _values(self, speeds: list[float]) -> list[float]:
        """Return the speeds, those of larger drafts increased by what these teach."""
        return [speed * (1 + TEACHES * log2(size)) for speed, size in zip(speeds, self.sizes)]

    def _review(self) -> None:
        """Change the size for a clear gain, pause drafts, or begin to measure another size."""
        speeds = self.speeds()[1]
        best = self._fastest(speeds)
        compared = self._values(speeds) if best else speeds
        fresh = self._steps - self._measured <= 2 * REVIEW
        measured = fresh and self._trial == best
        plain_is_known = self._timers[self._batch].is_known(0) or (measured and best == 0)
        if (self._probing or plain_is_known) and speeds[0] > speeds[self._usual]:
            self._plain_left = self._cooldown
            self._cooldown = min(2 * self._cooldown, LONGEST_COOLDOWN)
        elif self._probing:
            self._cooldown = COOLDOWN
        elif compared[best] <= GAIN * compared[self._usual]:
            self._explore(speeds)
        elif measured:
            self._usual = best
        else:
            self._measure(best)
        self._probing = False

    def _explore(self, speeds: list[float]) -> None:
        """Measure a neighbour of the current size, or plain decoding, if it is due."""
        timer = self._timers[self._batch]
        around = [self._usual + 1, self._usual - 1]
        if self._turn % 2:
            around.reverse()
        others = [i for i in around if 0 < i < len(self.sizes)]
        forgotten = self._steps - self._plain_measured >= RARELY
        if speeds[0] > HOPELESS * max(speeds) or forgotten:
            others.insert(0 if self._turn % 4 == 3 else len(others), 0)
        other = min(others, key=timer.is_known)  # the first of those not known, or of all
        interval = SELDOM if timer.is_known(other) else OFTEN
        if self._steps - self._measured >= interval:
            self._measure(other)

    def _measure(self, size: int, steps: int = TRIAL) -> None:
        """Take the size of this index in the next steps."""
        self._trial, self._trial_left, self._measured = size, steps, self._steps
        self._turn += 1
        if size == 0:
            self._plain_measured = self._steps

    def _begin_probe(self) -> None:
        """Try drafts again after a cooldown; what they promised before counts little."""
        self._promised *= FADED
        self._watched *= FADED
        self._came *= FADED
        self._said *= FADED
        self._usual = self._fastest(self.speeds()[1], least=1)
        self._measure(self._usual, PROBE)
        self._reviewed, self._probing = self._steps - REVIEW + PROBE, True

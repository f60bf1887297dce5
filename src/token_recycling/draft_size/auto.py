"""The automatic draft-size policy: every draft is cut where its tokens per second are greatest."""

from __future__ import annotations

from math import exp, log, log2
from typing import Any

import numpy as np
import torch
from torch import Tensor

from token_recycling.draft_size.base import DraftSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.draft_size.gate import SpeculationGate
from token_recycling.errors import TokenRecyclingError
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree

# A draft of twice the size is worth more than its own tokens, by this part of what drafts bring at
# present: every node that is verified, rejected ones too, teaches the drafter.
TEACHES = 0.15
# Steps after which the weight of an old one is 1/e, for tokens and for costs.
MEMORY, COST_MEMORY = 100.0, 200.0
GAIN = 0.5  # drafted tokens that come in a step, before the first
KEPT = 4.0  # tokens that count as promised and emitted before the first step
# A draft is grown to at least so many nodes, and to so many times the largest of the last ones.
FEWEST, AHEAD = 8, 2.0
REFRESH = 16  # steps for which costs are taken as constant
# Of a step's seconds: the most by which their logarithm differs from the expected one, so that a
# step that was interrupted counts little.
OUTLIER = 0.5
# Sums of squared differences between the log2 of sizes: the weight of the curve's own slope (and of
# the line itself, in steps), and what is enough to know the slope. While it is less, one step of so
# many takes half its best size.
TRUST, ENOUGH, EXPLORE = 4.0, 8.0, 16
# After so many drafts in a row of which none is worth verifying, drafts pause for ``COOLDOWN``
# steps, twice as many every time, and then so many are verified whatever they promise.
PATIENCE, PROBE, COOLDOWN, LONGEST_COOLDOWN = 16, 8, 32, 512


class StepCosts:
    """Costs of steps: a curve, corrected by the measured seconds of steps.

    The logarithm of seconds over the curve's cost is fitted by a line in the logarithm of the
    tokens verified. Its height does not matter: a machine that is slower in all steps prefers the
    same sizes. What is left is the mean of each number of tokens: kernels work in blocks, so that
    9 tokens can cost less than 8.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        # Decayed sums of 1, x, y, x^2 and x y, for x = log2(tokens) and y = log(seconds / curve).
        self._sums = np.zeros(5)
        # By tokens: decayed sums of 1, and of what the line leaves of y.
        self._left: dict[int, tuple[float, float]] = {}

    @property
    def spread(self) -> float:
        """Sum of squared differences of the log2 of tokens from their mean."""
        weight, x, _, xx, _ = self._sums
        return float(xx - x * x / weight) if weight else 0.0

    @property
    def slope(self) -> float:
        """Change of the logarithm when the tokens double."""
        weight, x, y, _, xy = self._sums
        return float((xy - x * y / weight) / (self.spread + TRUST)) if weight else 0.0

    def record(self, tokens: int, context: float, seconds: float) -> None:
        """Learn from a step that verified so many tokens after so many cached ones."""
        x, y = log2(tokens), log(max(seconds, 1e-9) / self.curve.at(tokens, context))
        weight, sum_x, sum_y = (float(one) for one in self._sums[:3])
        if weight:
            usual = sum_y / weight + self.slope * (x - sum_x / weight)
            left = min(max(y - usual, -OUTLIER), OUTLIER)
            y = usual + left
            seen, total = self._left.get(tokens, (0.0, 0.0))
            kept = 1 - 1 / MEMORY
            self._left[tokens] = kept * seen + 1, kept * total + left
        self._sums = (1 - 1 / COST_MEMORY) * self._sums + np.array([1.0, x, y, x * x, x * y])

    def of(self, tokens: Any, context: float) -> Any:
        """Return the cost of steps of these numbers of tokens, up to a common factor.

        Args:
            tokens: ascending array.
            context: tokens in the cache.
        """
        # The curve is linear between its sizes and beyond the last one.
        last = max(self.curve.sizes[-1], int(tokens[-1])) + 1
        points = [*self.curve.sizes, last]
        costs = np.interp(tokens, points, [self.curve.at(n, context) for n in points])
        costs *= np.exp(self.slope * np.log2(tokens))
        for n, (seen, total) in self._left.items():
            costs[tokens == n] *= exp(total / (seen + TRUST))
        return costs


class AutoSize(DraftSize):
    """Verifies the first n nodes of every draft, for the n with the most tokens per second.

    The expected tokens of a step are 1 and the scores of its nodes, which are probabilities (the
    drafter's acceptance probabilities where a draft has no scores), times the ratio of tokens that
    came to tokens that were promised. The best size of many steps, the ratio of two sums, is hardly
    better than the best of each. Drafts of which none is worth verifying pause.
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
        self.costs = costs
        self._step_costs = StepCosts(costs)
        self._acceptance = np.array(acceptance)
        self.most = len(acceptance) + 1
        self._nodes = np.arange(1, self.most + 1)
        self._doublings = np.log2(self._nodes)
        self._mean = self._acceptance.copy()  # decayed mean of the scores of each node
        self._came = self._said = KEPT  # decayed sums: drafted tokens that came, and were promised
        self._gain = GAIN  # decayed mean of the drafted tokens that come in a step
        self._batch, self._context = 1, 0.0
        self._reach = float(FEWEST)  # nodes to grow
        self._promised = 0.0  # tokens that the nodes of this step promise
        self._steps = self._idle = 0  # steps so far; drafts in a row that were not verified
        self._cooldown, self._plain_left, self._probe_left = COOLDOWN, 0, 0
        self._refresh()

    def _refresh(self) -> None:
        self._prices = self._step_costs.of(self._batch * self._nodes, self._context)

    @property
    def pays(self) -> bool:  # type: ignore[override]
        """False while drafts pause."""
        return not self._plain_left

    @property
    def size(self) -> int:
        """The best size of an average draft, including the root; 1 while drafts pause."""
        return 1 if self._plain_left else self._best(self._mean.cumsum())

    def speeds(self) -> tuple[Any, Any]:
        """Return, per size from 1 on, the expected MAT and the expected tokens per unit of cost."""
        mats = 1 + self._came / self._said * np.concatenate([[0.0], self._mean.cumsum()])
        return mats, mats / self._prices

    def for_graph(self) -> DraftSize:
        """Return a speculation gate between the current size and plain decoding."""
        return SpeculationGate(self.size, self.costs)

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt from texts."""
        sums = [*self._mean, self._came, self._said, self._gain]
        return {"tokens": torch.tensor(sums, dtype=torch.float64, device="cpu")}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a ``state``."""
        *mean, self._came, self._said, self._gain = state["tokens"].tolist()
        self._mean = np.array(mean)

    def begin(self, sequences: list[Sequence]) -> None:
        """Start with new texts."""
        self._context = float(max(len(sequence.tokens) for sequence in sequences))
        self._batch = len(sequences)
        self._refresh()

    def limit(self) -> int:
        """Return the nodes to grow in the next step."""
        return 1 if self._plain_left else min(self.most, int(self._reach))

    def _best(self, promised: Any, least: int = 1) -> int:
        """Return the size, from ``least`` on, with the most expected tokens per second.

        Args:
            promised: sums of the scores of the first 1, 2, … nodes below the root, at least one.
            least: 1, or 2 to leave plain decoding out.
        """
        n = len(promised) + 1
        teaches = TEACHES * self._gain * self._doublings[1:n]
        speeds = (1 + self._came / self._said * promised + teaches) / self._prices[1:n]
        best = int(speeds.argmax())
        return best + 2 if least > 1 or speeds[best] > 1 / self._prices[0] else 1

    def choose(self, draft: DraftTree, sequences: list[Sequence]) -> int:
        """Return the best size of this draft."""
        if draft.nodes == 1:
            self._promised = 0.0
            return 1
        scores = self._scores(draft, sequences)[: self.most - 1]
        promised = scores.cumsum()
        n = self._best(promised, least=2 if self._probe_left else 1)
        if self._steps % EXPLORE == EXPLORE - 1 and self._step_costs.spread < ENOUGH:
            n = (n + 1) // 2
        self._promised = float(promised[n - 2]) if n > 1 else 0.0
        self._reach = max(float(FEWEST), AHEAD * n, self._reach * (1 - 1 / REFRESH))
        self._mean[: len(scores)] += (scores - self._mean[: len(scores)]) / MEMORY
        self._idle = 0 if n > 1 else self._idle + 1
        if n > 1 and not self._probe_left:
            self._cooldown = COOLDOWN
        return n

    def _scores(self, draft: DraftTree, sequences: list[Sequence]) -> Any:
        """Return the mean score of each node below the root over the active rows: [n - 1]."""
        # NumPy selects and multiplies a few numbers in a tenth of PyTorch's time.
        scores = self._acceptance[: draft.nodes - 1]
        if draft.scores is not None:
            scores = draft.scores.numpy()[:, 1:]
        found = scores * draft.valid.numpy()[:, 1:]
        return found[0] if len(found) == 1 else found[[one.active for one in sequences]].mean(0)

    def record(self, step: Step, sequences: list[Sequence]) -> None:
        """Update costs and the ratio of tokens from a step; begin and end pauses."""
        counts = [len(tokens) for tokens in step.tokens]
        mean = sum(counts) / max(sum(map(bool, counts)), 1)
        self._step_costs.record(len(counts) * step.nodes, self._context, sum(step.seconds))
        self._context += mean
        self._gain += (mean - 1 - self._gain) / MEMORY
        if self._promised:
            kept = 1 - 1 / MEMORY
            self._said = kept * self._said + self._promised
            self._came = kept * self._came + mean - 1
        self._steps += 1
        if self._steps % REFRESH == 0:
            self._refresh()
        if self._plain_left:
            self._plain_left -= 1
            self._probe_left = 0 if self._plain_left else PROBE
        elif self._probe_left:
            self._probe_left -= 1
        elif self._idle >= PATIENCE:
            self._plain_left, self._idle = self._cooldown, 0
            self._cooldown = min(2 * self._cooldown, LONGEST_COOLDOWN)

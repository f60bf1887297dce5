"""The costs of steps: a curve, corrected by the measured seconds of steps."""

from __future__ import annotations

from math import exp, log, log2
from typing import Any

import numpy as np

from token_recycling.drafting.size.costs import CostCurve

# Steps after which the weight of an old one is 1/e: for the line, and for single sizes.
MEMORY, SIZE_MEMORY = 200.0, 100.0
# The most by which the logarithm of a step's seconds differs from the expected one, so that a step
# that was interrupted counts little.
OUTLIER = 0.5
# Weights of what is assumed: the curve's slope, measured or not, in squared doublings of tokens; no
# jump, in plain steps; the line, in steps of a size.
TRUST_SLOPE, TRUST_GUESS, TRUST_JUMP, TRUST_LINE = 4.0, 2.0, 1.0, 4.0


class StepCosts:
    """A cost curve that follows the steps.

    The logarithm y of seconds over the curve's cost is fitted by a line in x, the log2 of the
    tokens verified, and a jump between plain steps and those with drafts. Its height does not
    matter: a machine that is slower in all steps prefers the same sizes. What is left is the mean
    of each number of tokens: kernels work in blocks, so that 9 tokens can cost less than 8.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._assumed: dict[int, float] = {}  # the curve's costs by tokens
        # Decayed sums over steps of 1, x, d, y, x x, x d, x y, d y; d is 1 in steps with drafts.
        self._sums = [0.0] * 8
        # By tokens, and by d: decayed sums of 1, and of what the line leaves of y.
        self._residuals: dict[tuple[int, bool], tuple[float, float]] = {}

    @property
    def spread(self) -> float:
        """Sum of squared differences of x from its mean."""
        weight, x, _, _, xx, *_ = self._sums
        return xx - x * x / weight if weight else 0.0

    def line(self) -> tuple[float, float, float]:
        """Return height, slope and jump by least squares (ridge regression)."""
        weight, x, d, y, xx, xd, xy, dy = self._sums
        if not weight:
            return 0.0, 0.0, 0.0
        trust = TRUST_SLOPE if self.curve.measured else TRUST_GUESS
        sxx, sdd = xx - x * x / weight + trust, d - d * d / weight + TRUST_JUMP
        sxd, sxy, sdy = xd - x * d / weight, xy - x * y / weight, dy - d * y / weight
        determinant = sxx * sdd - sxd * sxd
        slope = (sxy * sdd - sdy * sxd) / determinant
        jump = (sdy * sxx - sxy * sxd) / determinant
        return (y - slope * x - jump * d) / weight, slope, jump

    def record(self, tokens: int, drafted: bool, seconds: float) -> None:
        """Learn from a step that verified ``tokens`` tokens, the roots included.

        The first of each number of tokens is left out: kernels may be prepared in it.

        Args:
            tokens: of all rows.
            drafted: True if more than the roots were verified.
            seconds: of the step.
        """
        known = self._residuals.setdefault((tokens, drafted), (-1.0, 0.0))
        if known[0] < 0:
            self._residuals[tokens, drafted] = 0.0, 0.0
            self._assumed[tokens] = float(self.curve.at(tokens))
            return
        x, d = log2(tokens), float(drafted)
        y = log(max(seconds, 1e-9) / self._assumed[tokens])
        if self._sums[0]:
            height, slope, jump = self.line()
            usual = height + slope * x + jump * d
            residual = min(max(y - usual, -OUTLIER), OUTLIER)
            y = usual + residual
            fade = 1 - 1 / SIZE_MEMORY
            self._residuals[tokens, drafted] = fade * known[0] + 1, fade * known[1] + residual
        fade = 1 - 1 / MEMORY
        new = (1.0, x, d, y, x * x, x * d, x * y, d * y)
        self._sums = [fade * old + term for old, term in zip(self._sums, new)]

    def of(self, tokens: Any) -> Any:
        """Return the cost of steps, up to a common factor.

        Args:
            tokens: R, R + 1, …: a plain step of R rows, and steps with drafts.
        """
        first, last = int(tokens[0]), int(tokens[-1])
        costs = self.curve.at(tokens)
        _, slope, jump = self.line()
        costs *= np.exp(slope * np.log2(tokens) + jump * (tokens > first))
        for (n, drafted), (seen, total) in self._residuals.items():
            if first <= n <= last and drafted == (n > first) and seen > 0:
                costs[n - first] *= exp(total / (seen + TRUST_LINE))
        return costs

"""When drafts of a fixed size do not pay: plain steps for a while, then another try."""

from __future__ import annotations

from token_recycling.costs import CostCurve

TRIAL = 24  # drafted steps before a verdict
MEMORY = 50.0  # steps after which an old one counts 1/e
REST, LONGEST_REST = 64, 512  # plain steps from one trial to the next, twice as many each time


class Throttle:
    """Compares the tokens that a step brings with what it costs in plain steps.

    A graph has one size, so there is less to choose than in ``BudgetDrafter``: drafts of this
    size or plain decoding.
    """

    def __init__(self, size: int, costs: CostCurve) -> None:
        """Begin with drafts of ``size`` tokens, the root included."""
        self.size, self.costs = size, costs
        self._resting, self._rest = 0, REST
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._steps, self._tokens, self._weight = 0, 0.0, 0.0

    @property
    def nodes(self) -> int:
        """Tokens that the next step should verify."""
        return 1 if self._resting else self.size

    def note(self, tokens: float, rows: int, context: float) -> None:
        """Take what a step emitted.

        Args:
            tokens: mean over the rows that took part.
            rows: of the batch.
            context: tokens in the cache.
        """
        if self._resting:
            self._resting -= 1
            return
        keep = 1 - 1 / MEMORY
        self._steps += 1
        self._tokens = keep * self._tokens + tokens
        self._weight = keep * self._weight + 1
        if self._steps < TRIAL:
            return
        price = self.costs.at(rows * self.size, context) / self.costs.at(rows, context)
        if self._tokens / self._weight >= price:
            self._rest = REST
            return
        self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        self._begin_trial()

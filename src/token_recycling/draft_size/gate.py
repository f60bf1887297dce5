"""The draft-size policy of graph steps: one draft size, or plain decoding during a cooldown."""

from __future__ import annotations

from token_recycling.draft_size.base import DraftSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence

TRIAL = 24  # drafted steps before a decision
MEMORY = 50.0  # steps after which the weight of an old one is 1/e
# Plain steps between trials: initial and maximum number. Every failed trial doubles it.
COOLDOWN, LONGEST_COOLDOWN = 64, 512


class SpeculationGate(DraftSize):
    """Pauses drafting while a step emits fewer tokens than it costs in plain steps.

    Intended for graph steps: every size is a graph of its own, so there are only two sizes.
    """

    def __init__(self, size: int, costs: CostCurve) -> None:
        """Start with drafts of ``size`` tokens, including the root."""
        self.size, self.costs = size, costs
        self._plain_steps_left, self._cooldown = 0, COOLDOWN
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._steps, self._tokens, self._weight = 0, 0.0, 0.0

    def limit(self) -> int:
        """Return the draft size, or 1 during a cooldown."""
        return 1 if self._plain_steps_left else self.size

    def record(self, step: Step, sequences: list[Sequence]) -> None:
        """Count the tokens of a step; end the trial or the cooldown when due."""
        if self._plain_steps_left:
            self._plain_steps_left -= 1
            return
        rows = len(step.tokens)
        emitted = sum(map(len, step.tokens)) / max(1, sum(map(bool, step.tokens)))
        decay = 1 - 1 / MEMORY
        self._steps += 1
        self._tokens = decay * self._tokens + emitted
        self._weight = decay * self._weight + 1
        if self._steps < TRIAL:
            return
        context = max(len(sequence.tokens) for sequence in sequences)
        price = self.costs.at(rows * self.size, context) / self.costs.at(rows, context)
        if self._tokens / self._weight >= price:
            self._cooldown = COOLDOWN
            return
        self._plain_steps_left = self._cooldown
        self._cooldown = min(2 * self._cooldown, LONGEST_COOLDOWN)
        self._begin_trial()

"""Drafts of one size or plain decoding: plain steps for a while where drafts do not pay."""

from __future__ import annotations

from token_recycling.draft_size.base import DraftSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.metrics import Step
from token_recycling.sequence import Sequence

TRIAL = 24  # drafted steps before a decision
MEMORY = 50.0  # steps after which an old one counts 1/e
# Plain steps from one trial to the next: at first, and at most. Each failed trial doubles them.
COOLDOWN, LONGEST_COOLDOWN = 64, 512


class SpeculationGate(DraftSize):
    """Compares the tokens that a step emits with what it costs in plain steps.

    For steps that are captured as graphs: every size is a graph of its own, so there are two only.
    """

    def __init__(self, size: int, costs: CostCurve) -> None:
        """Begin with drafts of ``size`` tokens, the root included."""
        self.size, self.costs = size, costs
        self._plain_steps_left, self._cooldown = 0, COOLDOWN
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._steps, self._tokens, self._weight = 0, 0.0, 0.0

    def limit(self) -> int:
        """Return the size, or 1 during a cooldown."""
        return 1 if self._plain_steps_left else self.size

    def record(self, step: Step, sequences: list[Sequence]) -> None:
        """Take what a step emitted."""
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

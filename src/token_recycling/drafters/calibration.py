"""How often a candidate of each kind was right: scores that mean what they say."""

from __future__ import annotations

import torch
from torch import Tensor

PRIOR = 4.0  # observations that the expected rate counts for
SUREST = 0.995  # a rate at most, so that a node's score is below its parent's


class Calibration:
    """Estimates, per feature of a candidate, the rate of times that it was the next token.

    Softmax probabilities are no such rates: greedy text takes the first candidate whatever its
    lead, and a row was written in another context than the one it is used in. So every candidate
    has a feature (its source, its rank, its probability, …), and hits and trials are counted per
    feature along the text that came: rate = (hits + PRIOR · expected) / (trials + PRIOR).
    """

    def __init__(self, evidence: Tensor, expected: Tensor) -> None:
        """Go on from counts.

        Args:
            evidence: float32 [2, f], hits and trials; counted on in place.
            expected: float32 [f], rates before anything was counted; 0 stays 0.
        """
        self.evidence, self.expected = evidence, expected.to(evidence.device)
        self.logs = torch.empty_like(self.expected)  # of the rates
        self.refresh()

    def refresh(self) -> None:
        """Compute the rates from the counts."""
        hits, trials = self.evidence
        rates = (hits.minimum(trials) + PRIOR * self.expected) / (trials + PRIOR)
        rates = torch.where(self.expected > 0, rates, 0.0)
        self.logs.copy_(rates.clamp(max=SUREST).log())

    def count(self, features: Tensor, right: Tensor, there: Tensor) -> None:
        """Count candidates: int64 features, bool right and bool there, of one shape."""
        features, there = features.flatten(), there.flatten()
        hits = there & right.flatten()
        self.evidence.index_add_(1, features, torch.stack([hits, there]).float())

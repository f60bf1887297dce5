"""Calibrated candidate scores: how often a candidate of each kind was right."""

from __future__ import annotations

import torch
from torch import Tensor

PRIOR = 4.0  # weight of the expected rate, in observations
SUREST = 0.995  # upper bound of rates, so that a node's score is below its parent's


class Calibration:
    """Estimates, per feature, how often a candidate with it is the next token.

    Softmax probabilities are not such rates: greedy decoding takes the first candidate however
    small its lead, and a row was recorded in another context than the one in which it is used.
    Every candidate therefore has a feature (source, rank, probability, …), and hits and trials per
    feature are counted along the emitted text: rate = (hits + PRIOR · expected) / (trials + PRIOR).
    """

    def __init__(self, evidence: Tensor, expected: Tensor) -> None:
        """Continue from existing counts.

        Args:
            evidence: float32 [2, f], hits and trials; updated in place.
            expected: float32 [f], rates before anything is counted; a rate of 0 stays 0.
        """
        self.evidence, self.expected = evidence, expected.to(evidence.device)
        self.logs = torch.empty_like(self.expected)  # logarithms of the rates
        self.refresh()

    def refresh(self) -> None:
        """Recompute the rates from the counts."""
        hits, trials = self.evidence
        rates = (hits.minimum(trials) + PRIOR * self.expected) / (trials + PRIOR)
        rates = torch.where(self.expected > 0, rates, 0.0)
        self.logs.copy_(rates.clamp(max=SUREST).log())

    def count(self, features: Tensor, right: Tensor, there: Tensor) -> None:
        """Count candidates; all tensors have the same shape.

        Args:
            features: int64, each candidate's feature.
            right: bool, True where the candidate was the next token.
            there: bool, False where there was no candidate.
        """
        features, there = features.flatten(), there.flatten()
        hits = there & right.flatten()
        self.evidence.index_add_(1, features, torch.stack([hits, there]).float())

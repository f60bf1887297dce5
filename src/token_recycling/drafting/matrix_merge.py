"""Merging what two matrices have learnt: rows, evidence and weights."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.util.tokens import NO_TOKEN


def merge_scores(ids: Tensor, probabilities: Tensor) -> Tensor:
    """Return what candidates are ranked by, float32 [rows, k]: probabilities, else 2^-(rank + 1).

    Args:
        ids: int32 [rows, k], best first; ``NO_TOKEN`` where there is none.
        probabilities: float16 [rows, k]; a row of zeros has none recorded.
    """
    recorded = probabilities.float()
    by_rank = 0.5 ** torch.arange(1, ids.shape[1] + 1, dtype=torch.float32, device="cpu")
    scores = torch.where(recorded.sum(dim=1, keepdim=True) > 0, recorded, by_rank)
    return scores.masked_fill(ids == NO_TOKEN, 0.0)


def merge_rows(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge rows of candidates, each with its probabilities: int32 and float16 [rows, k].

    A row that only one side has is copied. Where both have one, the scores of equal candidates are
    added, the best k are kept and recorded probabilities are averaged. On equal scores, those of
    ``first`` win.
    """
    k = first[0].shape[1]
    ids, p = (torch.cat(both, dim=1) for both in zip(first, second))
    p, scores = p.float(), torch.cat([merge_scores(*first), merge_scores(*second)], dim=1)
    match = (ids[:, :k, None] == ids[:, None, k:]) & (ids[:, :k, None] != NO_TOKEN)
    scores[:, :k] += (match * scores[:, None, k:]).sum(dim=2)
    p[:, :k] += (match * p[:, None, k:]).sum(dim=2)
    scores[:, k:].masked_fill_(match.any(dim=1), -1.0)
    scores.masked_fill_(ids == NO_TOKEN, -1.0)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    both = (ids[:, :1] != NO_TOKEN) & (ids[:, k : k + 1] != NO_TOKEN)
    taken = scores.gather(1, order) >= 0
    best = ids.gather(1, order).masked_fill(~taken, NO_TOKEN)
    return best, (p.gather(1, order) * torch.where(both, 0.5, 1.0)).masked_fill(~taken, 0.0).half()


def merge_evidence(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge evidence, float32 [2, f], and weights, float64 [s, i]; either may have no elements.

    Counts are added, weights averaged in proportion to the counts. What has another shape than in
    ``first`` is dropped.
    """
    (evidence, weights), (more, other) = first, second
    trials, more_trials = float(evidence[1].sum()), float(more[1].sum())
    if evidence.shape == more.shape:
        evidence = evidence + more
    elif not evidence.numel():
        evidence = more
    if not weights.numel() or not trials:
        weights = other if other.numel() else weights
    elif weights.shape == other.shape and more_trials:
        weights = (trials * weights + more_trials * other) / (trials + more_trials)
    return evidence, weights

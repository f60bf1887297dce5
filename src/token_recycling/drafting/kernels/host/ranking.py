"""The most likely branch of a draft, for engines that verify chains."""

from __future__ import annotations

from skinny_kernels.compiled import compiled
from token_recycling.drafting.kernels.host.state import Array
from token_recycling.util.tokens import NO_TOKEN


@compiled
def likeliest(
    parents: Array, valid: Array, tokens: Array, scores: Array, chain: Array, chances: Array
) -> None:
    """Follow the first child, the most likely one, from each root down.

    Args:
        parents: int64 [B, n], nodes in descending order of their scores.
        valid: bool [B, n].
        tokens: int64 [B, n].
        scores: float32 [B, n].
        chain: int64 [B, m], gets the tokens of the branch, padded with ``NO_TOKEN``.
        chances: float32 [B, m], gets their scores, padded with 0.
    """
    chain[:] = NO_TOKEN
    chances[:] = 0
    for row in range(len(parents)):
        last, count = 0, 1
        chain[row, 0], chances[row, 0] = tokens[row, 0], scores[row, 0]
        for node in range(1, parents.shape[1]):
            if count == chain.shape[1]:
                break
            if valid[row, node] and parents[row, node] == last:
                chain[row, count], chances[row, count] = tokens[row, node], scores[row, node]
                last = node
                count += 1

"""What ``auto`` computes in every step, compiled: small models take 2 ms for a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from skinny_kernels.compiled import compiled


@compiled
def speeds(promised: Any, at: Any, prices: Any, doublings: Any, ratio: float, learnt: float) -> Any:
    """Return the tokens per unit of cost of a plain step, then of each choice of nodes.

    Args:
        promised: float [c], sum of the scores per row of each choice.
        at: int64 [c], its index into prices.
        prices: float64, the cost of a step by its tokens.
        doublings: float64, log2 of its tokens per row.
        ratio: tokens that came for each that was expected.
        learnt: what each doubling is worth, in tokens.

    Returns:
        float64 [c + 1].
    """
    found = np.empty(len(promised) + 1)
    found[0] = 1 / prices[0]
    for i in range(len(promised)):
        worth = 1 + ratio * promised[i] + learnt * doublings[at[i]]
        found[i + 1] = worth / prices[at[i]]
    return found


@compiled
def best(speeds: Any, at: Any, odd: Any, probing: bool) -> int:
    """Return the index of the greatest of ``speeds``.

    Choices that are ``odd`` (bool, by ``at``) are left out, except for the last; a plain step is if
    ``probing``.
    """
    found, last = -1, len(at)
    for i in range(last + 1):
        is_out = probing if i == 0 else i < last and odd[at[i - 1]]
        if not is_out and (found < 0 or speeds[i] > speeds[found]):
            found = i
    return max(found, 0)


@compiled
def choose(
    scores: Any,
    valid: Any,
    mean: Any,
    fade: float,
    rows: int,
    prices: Any,
    doublings: Any,
    odd: Any,
    ratio: float,
    learnt: float,
    probing: bool,
) -> Any:
    """Choose the nodes to verify of drafts of which each row verifies as many.

    Args:
        scores: float [B, n].
        valid: bool [B, n]; a row whose root is invalid has ended.
        mean: float64 [m], of the scores of each drafted node in earlier steps; updated.
        fade: weight of this step in it.
        rows: by which ``prices`` begin.
        prices: see ``speeds``, like ``doublings``, ``ratio`` and ``learnt``.
        odd: see ``best``, like ``probing``.

    Returns:
        The nodes below the root, and the sums of the mean scores of the first 1, 2, … of them.
    """
    means = np.zeros(min(scores.shape[1] - 1, len(mean)))
    going, last = 0, 0
    for row in range(len(scores)):
        if not valid[row, 0]:
            continue
        going += 1
        for node in range(len(means)):
            if valid[row, node + 1] and scores[row, node + 1] > 0:
                means[node] += scores[row, node + 1]
                last = max(last, node + 1)
    means /= max(going, 1)
    for node in range(len(means)):
        mean[node] += (means[node] - mean[node]) * fade
    promised = means[:last].cumsum()
    at = rows * np.arange(1, last + 1)
    found = best(speeds(promised, at, prices, doublings, ratio, learnt), at, odd, probing)
    return found, promised

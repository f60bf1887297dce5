"""The published drafter on the host: filling a template, and replacing rows.

All functions work on NumPy arrays; B rows of a batch, n nodes, k candidates, V tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from skinny_kernels.compiled import compiled
from token_recycling.util.tokens import NO_TOKEN

Array = Any  # a NumPy array; numba derives dtype and shape from the call


@compiled
def fill_template(
    candidates: Array, parents: Array, ranks: Array, tokens: Array, valid: Array
) -> None:
    """Fill trees of a fixed shape: a node is the candidate of its rank in its parent's row.

    With the paths (0), (1), (0, 0), the root 5 and the rows 5: 8 9 and 8: 4 7, the nodes are 5, 8,
    9, 4.

    Args:
        candidates: int32 [V, k].
        parents: int64 [n], each before its children.
        ranks: int64 [n].
        tokens: int64 [B, n]; has the roots, gets the other tokens, 0 where there is none.
        valid: bool [B, n], gets True where there is a token.
    """
    for row in range(len(tokens)):
        valid[row, 0] = True
        for node in range(1, len(parents)):
            above = parents[node]
            token = np.int64(NO_TOKEN)
            if valid[row, above]:
                token = np.int64(candidates[tokens[row, above], ranks[node]])
            valid[row, node] = token >= 0
            tokens[row, node] = max(token, 0)


@compiled
def replace_rows(
    tokens: Array, valid: Array, ids: Array, candidates: Array, probabilities: Array
) -> None:
    """Replace the rows of the valid tokens, in order, without probabilities.

    Args:
        tokens: int64 [n].
        valid: bool [n].
        ids: int64 [n, k].
        candidates: int32 [V, k], modified.
        probabilities: uint16 [V, k], modified.
    """
    for i in range(len(tokens)):
        if valid[i]:
            for rank in range(candidates.shape[1]):
                candidates[tokens[i], rank] = ids[i, rank]
                probabilities[tokens[i], rank] = 0

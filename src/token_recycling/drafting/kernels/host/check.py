"""Whether a draft of somebody else is a draft."""

from __future__ import annotations

from typing import Any

from skinny_kernels.compiled import compiled

FAULTS = (
    "node 0 must be the root",
    "a root is not valid",
    "a parent must come before its children",
    "depths must be those of the parents and 1, and 0 at the root",
    "tokens must be from 0 to {last_token}",
    "a node below an invalid node must not be valid",
    "ancestors must be each node itself and those of its parent",
)


@compiled
def find_fault(
    roots: Any, tokens: Any, parents: Any, depths: Any, ancestors: Any, valid: Any, vocab_size: int
) -> tuple[int, int]:
    """Return the row and the number of the first fault in ``FAULTS``; number -1: the deepest depth.

    Arguments are the parts of a ``DraftTree`` as arrays; ``roots``: int64 [B].
    """
    batch, n = tokens.shape
    deepest = 0
    for row in range(batch):
        if tokens[row, 0] != roots[row]:
            return row, 0
        if not valid[row, 0]:
            return row, 1
        if parents[row, 0] != 0:
            return row, 2
        if depths[row, 0] != 0:
            return row, 3
        for node in range(n):
            token, parent = tokens[row, node], parents[row, node]
            if node and not 0 <= parent < node:
                return row, 2
            if not 0 <= token < vocab_size:
                return row, 4
            if not valid[row, node]:  # nothing is below it, and nothing is read of it
                if not 0 <= depths[row, node] <= node:
                    return row, 3
                continue
            if node and depths[row, node] != depths[row, parent] + 1:
                return row, 3
            if not valid[row, parent]:
                return row, 5
            for other in range(n):
                expected = other == node or (node > 0 and ancestors[row, parent, other])
                if ancestors[row, node, other] != expected:
                    return row, 6
            deepest = max(deepest, depths[row, node])
    return deepest, -1

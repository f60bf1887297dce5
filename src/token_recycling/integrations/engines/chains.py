"""Greedy acceptance of chains of different lengths, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from token_recycling.util.compiled import compiled
from token_recycling.util.tokens import NO_TOKEN


def accept_chains(drafted: Any, choices: Any, counts: list[int], width: int) -> Any:
    """Return each row's tokens, up to the first that differs from its chain.

    Args:
        drafted: int32 [sum of counts - B], the drafted tokens of all rows.
        choices: int64 [sum of counts], the target's choice after each root and drafted token.
        counts: choices of each row, at least 1.
        width: t, at least the largest of them.

    Returns:
        int32 [B, t], padded with ``NO_TOKEN``.
    """
    emitted = np.full((len(counts), width), NO_TOKEN, np.int32)
    _accept(drafted, choices, np.array(counts), emitted)
    return emitted


def compile_acceptance() -> None:
    """Compile what ``accept_chains`` calls, before the first request."""
    accept_chains(np.zeros(0, np.int32), np.zeros(1, np.int64), [1], 1)


@compiled
def _accept(drafted: Any, choices: Any, counts: Any, emitted: Any) -> None:
    """Write to ``emitted``; see ``accept_chains``."""
    first, begin = 0, 0  # of the row's choices, and of its drafted tokens
    for row in range(len(counts)):
        for i in range(counts[row]):
            emitted[row, i] = choices[first + i]
            if i == counts[row] - 1 or drafted[begin + i] != choices[first + i]:
                break
        first += counts[row]
        begin += counts[row] - 1

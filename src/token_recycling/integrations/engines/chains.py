"""Greedy acceptance of chains of different lengths, on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from token_recycling.decoding.walks import host_walk


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
    shape = (len(counts), width)
    depths = np.tile(np.arange(width), (len(counts), 1))
    valid = depths < np.array(counts)[:, None]
    tokens, chosen = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    tokens[valid & (depths > 0)] = drafted
    chosen[valid] = choices
    path, emitted = np.empty(shape, np.int64), np.empty(shape, np.int64)
    host_walk(tokens, np.maximum(depths - 1, 0), depths, valid, chosen, path, emitted)
    return emitted.astype(np.int32)


def compile_acceptance() -> None:
    """Compile what ``accept_chains`` calls, before the first request."""
    accept_chains(np.zeros(0, np.int32), np.zeros(1, np.int64), [1], 1)

"""Lists of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

NO_TOKEN = -1  # the placeholder for "no token"


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def padded(rows: Sequence[Sequence[int]], fill: int = NO_TOKEN) -> list[list[int]]:
    """Return the rows, at least one token long, padded on the right to the longest."""
    longest = max([1, *map(len, rows)])
    return [[*row, *[fill] * (longest - len(row))] for row in rows]

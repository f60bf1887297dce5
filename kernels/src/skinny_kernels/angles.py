"""Angles of rotary embeddings, computed once for many positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skinny_kernels.compiled import as_array, as_bits, compiled

AHEAD = 512  # positions whose angles are computed at once


@compiled
def _look_up(positions: Any, begin: int, table: Any, out: Any) -> bool:
    """Copy the rows of some positions; return False if one of them has none.

    Args:
        positions: int64 [B, n].
        begin: position of the first row.
        table: [p, size].
        out: [B, n, size].
    """
    for row in range(len(positions)):
        for n in range(positions.shape[1]):
            at = positions[row, n] - begin
            if at < 0 or at >= len(table):
                return False
            out[row, n] = table[at]
    return True


class Angles:
    """Cosines and sines of a model's rotary embedding."""

    def __init__(
        self, compute: Callable[[Tensor], Any], by_position: bool, frequencies: list[Any]
    ) -> None:
        """Look up what ``compute`` returns.

        Args:
            compute: returns cosines and sines [B, n, size] of positions int64 [B, n].
            by_position: whether those of a position are the same in every text, and can be kept.
            frequencies: arrays that it reads; what is kept is computed anew when they change.
        """
        self._compute, self._by_position = compute, by_position
        self._frequencies = frequencies
        self._known: list[bytes] = []
        self._begin = 0
        self._tables: tuple[Any, ...] = ()

    def at(self, positions: Tensor) -> tuple[Any, ...]:
        """Return contiguous arrays of the cosines' and of the sines' bits [B, n, size]."""
        if not self._by_position:
            return tuple(as_bits(one.contiguous()) for one in self._compute(positions))
        places = as_array(positions)
        known = [array.tobytes() for array in self._frequencies]
        if known != self._known:
            self._tables, self._known = (), known
        while True:
            found = [np.empty((*places.shape, one.shape[1]), one.dtype) for one in self._tables]
            pairs = zip(self._tables, found)
            if found and all(_look_up(places, self._begin, *pair) for pair in pairs):
                return tuple(found)
            self._begin = int(places.min())
            span = torch.arange(self._begin, int(places.max()) + 1 + AHEAD, device="cpu")[None]
            self._tables = tuple(as_bits(one[0].contiguous()) for one in self._compute(span))

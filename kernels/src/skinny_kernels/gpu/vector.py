"""Parts of Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_NODES = 64  # nodes of a draft that a kernel is compiled for
LEAST_STEPS = 32  # tokens of a path, likewise
ROWS = tl.constexpr(32)  # rows of a batch that ``longest`` reads at once


def lanes(count: int, least: int) -> int:
    """Return a power of two of lanes for ``count`` numbers; up to ``least`` share a kernel."""
    return max(least, int(triton.next_power_of_2(count)))


@triton.jit
def longest(lengths, batch):
    """Return the largest of the lengths int64 [batch]."""
    found = tl.zeros([], tl.int64)
    for begin in range(0, batch, ROWS):
        row = begin + tl.arange(0, ROWS)
        found = tl.maximum(found, tl.max(tl.load(lengths + row, mask=row < batch, other=0), 0))
    return found


@triton.jit
def at(values, index, wanted):
    """Return the element ``wanted`` of a vector."""
    return tl.sum(tl.where(index == wanted, values, 0), 0)

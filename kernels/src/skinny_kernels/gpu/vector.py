"""A part of several Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(32)  # rows of a batch that are read at once


@triton.jit
def longest(lengths, batch):
    """Return the largest of the lengths int64 [batch]."""
    found = tl.zeros([], tl.int64)
    for begin in range(0, batch, ROWS):
        row = begin + tl.arange(0, ROWS)
        found = tl.maximum(found, tl.max(tl.load(lengths + row, mask=row < batch, other=0), 0))
    return found

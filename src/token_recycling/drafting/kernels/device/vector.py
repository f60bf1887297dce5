"""Parts of the Triton kernels: how many lanes they have, and an element of a vector."""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_NODES = 64  # nodes of a draft that a kernel is compiled for
LEAST_STEPS = 32  # tokens of a path, likewise


def lanes(count: int, least: int) -> int:
    """Return a power of two of lanes for ``count`` numbers; up to ``least`` share a kernel."""
    return max(least, int(triton.next_power_of_2(count)))


@triton.jit
def at(values, index, wanted):
    """Return the element ``wanted`` of a vector."""
    return tl.sum(tl.where(index == wanted, values, 0), 0)

"""The k best tokens of logits on a GPU, by blocks: two Triton kernels.

The k best values of a row are in the k blocks whose largest values are best. So one kernel reads
all logits for the largest value of every block, and another one searches k blocks. Of equal values
the first counts as better, as on the host, where PyTorch's ``topk`` leaves it open.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skinny_kernels.gpu.launch import launch
from token_recycling.util import machine

BLOCK = 128  # logits
MANY = 16  # blocks of a program


@triton.jit
def _load(logits, place, mask):
    """Load values as float32; NaN becomes infinite, so that it is chosen and not learnt from."""
    value = tl.load(logits + place, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.where(value == value, value, float("inf"))


@triton.jit
def _maxima(logits, maxima_out, V, count, BLOCK: tl.constexpr, MANY: tl.constexpr):
    """Find the largest value of ``MANY`` of the ``count`` blocks of a row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * MANY + tl.arange(0, MANY)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = _load(logits + row * V, place, place < V)
    tl.store(maxima_out + row * count + block, tl.max(value, 1), mask=block < count)


@triton.jit
def _choose(
    logits,
    maxima,
    values_out,
    ids_out,
    V,
    count,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Find the ``K`` best values of a row and their places."""
    row = tl.program_id(0).to(tl.int64)
    block, rank = tl.arange(0, BLOCKS), tl.arange(0, WIDTH)
    remaining = block < count
    top = tl.load(maxima + row * count + block, mask=remaining, other=-float("inf"))
    chosen = tl.full([WIDTH], BLOCKS, tl.int32)
    for i in range(K):
        best = tl.max(tl.where(remaining, top, -float("inf")), 0)
        first = tl.min(tl.where(remaining & (top == best), block, BLOCKS), 0)
        chosen = tl.where(rank == i, first, chosen)
        remaining = remaining & (block != first)
    place = chosen[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    remaining_here = (chosen < count)[:, None] & (place < V)
    value = _load(logits + row * V, place, remaining_here)
    for i in range(K):
        best = tl.max(tl.max(tl.where(remaining_here, value, -float("inf")), 1), 0)
        right = remaining_here & (value == best)
        first = tl.min(tl.min(tl.where(right, place, V), 1), 0)
        tl.store(values_out + row * K + i, best.to(values_out.dtype.element_ty))
        tl.store(ids_out + row * K + i, first.to(tl.int64))
        remaining_here = remaining_here & (place != first)


def device_top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best logits of each row, best first, and their tokens.

    Args:
        logits: [..., V], of any floating dtype.
        k: at most V.

    Returns:
        [..., k] of the same dtype, and int64 [..., k].
    """
    rows = logits.reshape(-1, logits.shape[-1]).contiguous()
    count = triton.cdiv(rows.shape[1], BLOCK)
    maxima = rows.new_empty((len(rows), count), dtype=torch.float32)
    values = rows.new_empty((*logits.shape[:-1], k))
    ids = torch.empty_like(values, dtype=torch.long)
    launch(
        _maxima,
        (len(rows), triton.cdiv(count, MANY)),
        *(rows, maxima, rows.shape[1], count),
        BLOCK=BLOCK,
        MANY=MANY,
        num_warps=4,
    )
    launch(
        _choose,
        (len(rows),),
        *(rows, maxima, values, ids, rows.shape[1], count),
        K=k,
        WIDTH=triton.next_power_of_2(k),
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(count),
        num_warps=4,
    )
    return values, ids


def is_faster(logits: Tensor, k: int) -> bool:
    """Return whether ``device_top_k`` finds the same values as PyTorch's ``topk``, in less time."""
    if not logits.is_cuda:
        return True  # Triton's interpreter
    ours, expected = device_top_k(logits, k)[0], logits.topk(k, dim=-1).values
    if not ours.equal(expected):
        return False
    return machine.is_faster(
        lambda: device_top_k(logits, k), lambda: logits.topk(k, dim=-1), logits.device
    )

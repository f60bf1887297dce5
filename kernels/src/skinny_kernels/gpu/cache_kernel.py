"""Writing the keys and values of a step to their slots of a cache, and moving them there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skinny_kernels.gpu.launch import launch

STRIDES = [f"{a}_{b}" for a in ("key", "value") for b in ("row", "head", "token")]
STRIDES += [f"{a}_{b}" for a in ("keys", "values") for b in ("row", "head", "slot")]


@triton.jit(do_not_specialize=["heads", "key_size", "value_size", *STRIDES])
def _write(
    keys,
    values,
    key,
    value,
    slots,
    heads,
    key_size,
    value_size,
    keys_row,
    keys_head,
    keys_slot,
    values_row,
    values_head,
    values_slot,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    WIDTH: tl.constexpr,
):
    """Copy one head of one token, of keys and of values."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = tl.program_id(1)
    slot = tl.load(slots + token)
    entry = tl.arange(0, WIDTH)
    source = key + row * key_row + head * key_head + token * key_token
    target = keys + row * keys_row + head * keys_head + slot * keys_slot
    inside = entry < key_size
    tl.store(target + entry, tl.load(source + entry, mask=inside), mask=inside)
    source = value + row * value_row + head * value_head + token * value_token
    target = values + row * values_row + head * values_head + slot * values_slot
    inside = entry < value_size
    tl.store(target + entry, tl.load(source + entry, mask=inside), mask=inside)


def write(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write the states of a step to a layer's cache.

    Args:
        keys: [B, heads, s, size], changed; entries of a head are contiguous.
        values: likewise, of any other size.
        key: [B, heads, n, size], of the dtype of ``keys``; entries of a head are contiguous.
        value: likewise.
        slots: int64 [n].
    """
    batch, heads, tokens, size = key.shape
    launch(
        _write,
        (batch * heads, tokens),
        *(keys, values, key, value, slots),
        *(heads, size, value.shape[3]),
        *(*keys.stride()[:3], *values.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        WIDTH=triton.next_power_of_2(max(size, value.shape[3])),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["heads", "block_stride", "head_stride", "slot_stride", "width"])
def _move(
    caches,
    slots,
    starts,
    firsts,
    counts,
    sources,
    heads,
    block_stride,
    head_stride,
    slot_stride,
    width,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Move the accepted path of one row, in one head of one layer."""
    row = tl.program_id(0)
    head = (tl.program_id(1) % heads).to(tl.int64)
    cache = tl.load(caches + tl.program_id(1) // heads).to(tl.pointer_type(tl.int32))
    entry = tl.arange(0, WIDTH)
    inside = entry < width
    first = tl.load(firsts + row)
    query = tl.load(starts + row + 1) - (tl.load(firsts + row + 1) - first)
    for i in range(1, tl.load(counts + row)):
        # Never from a place that was moved to before, as paths ascend.
        source = tl.load(sources + first + i) - first
        if source != i:
            old = tl.load(slots + query + source).to(tl.int64)
            new = tl.load(slots + query + i).to(tl.int64)
            lines = cache + head * head_stride + entry
            taken = lines + old // PAGE * block_stride + old % PAGE * slot_stride
            given = lines + new // PAGE * block_stride + new % PAGE * slot_stride
            there = inside & (old >= 0) & (new >= 0)
            tl.store(given, tl.load(taken, mask=there), mask=there)


def move(
    caches: Tensor,
    like: Tensor,
    slots: Tensor,
    starts: Tensor,
    firsts: Tensor,
    counts: Tensor,
    sources: Tensor,
) -> None:
    """Move keys and values of accepted paths to the slots behind their roots, in many layers.

    Args:
        caches: int64 [L], addresses of tensors like the next one.
        like: [blocks, heads, slots of a block, entries], the cache of one of the layers; the
            entries are contiguous, and their bytes a multiple of 4.
        slots: int64 [t], of the cache, of all queries of the step.
        starts: int32 [B + 1], the first query of each row, and their number.
        firsts: int32 [B + 1], the first node of each row, and their number; nodes are last queries.
        counts: int32 [B], nodes of the path.
        sources: int32 [m], for the first nodes of each row, as many as the path has, the nodes of
            the path; each of the others itself.
    """
    words = like.element_size() / 4
    heads, width = like.shape[1], int(like.shape[3] * words)
    launch(
        _move,
        (len(counts), len(caches) * heads),
        *(caches, slots, starts, firsts, counts, sources, heads),
        *(int(stride * words) for stride in like.stride()[:3]),
        width,
        PAGE=like.shape[2],
        WIDTH=triton.next_power_of_2(width),
        num_warps=1,
    )


def addresses(tensors: list[Tensor]) -> Tensor:
    """Return where tensors begin, int64 [L], on their device."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)

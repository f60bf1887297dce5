"""Launching the attention kernels: how programs work, and which keys each of them reads."""

from __future__ import annotations

from functools import lru_cache
from itertools import count
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from skinny_kernels.gpu.attention import TreeView
from skinny_kernels.gpu.attention_kernel import attend_kernel, combine_kernel
from skinny_kernels.gpu.launch import launch
from skinny_kernels.windows import RULES

QUERIES, KEYS = 64, 64  # of a program at once, at most; KEYS divides BLOCK
BLOCK = 64  # keys; a multiple of it divides the keys between the kernels
SPAN = 256  # keys of each of the first OCTAVE spans, a multiple of BLOCK; then twice as many
OCTAVE = 16  # spans of one length
LEAST_SPANS = 32  # that a kernel is compiled for: up to 12,288 keys need no other
PATH_KEYS = 64  # of the path of one node at once
COMBINED = 4  # queries whose spans a program combines
LARGE_MEMORY = 2**17  # bytes of shared memory; 160 KiB on an A100, 227 on an H100, else about 99
UNROLLED = 4  # spans that it reads before it adds them


class _Blocks(NamedTuple):
    """How a program works that attends for many nodes; the same for drafts of every size.

    Attributes:
        queries: at once.
        keys: at once.
        warps: of a program.
        stages: of loads ahead of their use.
    """

    queries: int
    keys: int
    warps: int
    stages: int


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a device; 0: not known.

    For tensors without memory, whose launches are only compiled, that of the current GPU.
    """
    if not torch.cuda.is_available() or device.type not in ("cuda", "meta"):
        return 0
    device = torch.device("cuda") if device.type == "meta" else device
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


def blocks(size: int, dtype: torch.dtype, memory: int = 0) -> _Blocks:
    """Return how programs attend: registers and shared memory are few.

    Args:
        size: entries of a head.
        dtype: of the keys.
        memory: see ``shared_memory``.
    """
    keys = KEYS if size <= 64 else KEYS // 2
    if dtype == torch.float32:
        queries = QUERIES if size <= 64 else QUERIES // 2 if size <= 128 else QUERIES // 4
        return _Blocks(queries, keys, 8 if queries > 16 else 4, 2)
    if size > 128:
        return _Blocks(QUERIES // 4, keys, 4, 2)
    return _Blocks(QUERIES, KEYS if memory >= LARGE_MEMORY else keys, 4, 3)


def span_begin(span: int) -> int:
    """Return the first key of a span: ``OCTAVE`` have ``SPAN`` keys, as many twice as many, …"""
    octave, number = divmod(span, OCTAVE)
    return (((1 << octave) - 1) * OCTAVE + (number << octave)) * SPAN


class Pages(NamedTuple):
    """Where the tokens of an engine's step are, whose cache consists of pages.

    Attributes:
        starts: int32 [B + 1], the first query of each row, and their number.
        blocks: int32 [B, m], the blocks of the cache that hold each row's keys.
        most: queries that a row has at most; rows of more are left out.
        longest: keys that a row has at most.
    """

    starts: Tensor
    blocks: Tensor
    most: int
    longest: int


def attend(query: Tensor, key: Tensor, value: Tensor, view: TreeView, scale: float) -> Tensor:
    """Attend with the nodes of drafts.

    Args:
        query: [B, H, n, D], float16, bfloat16 or float32; entries of a head are contiguous.
        key: [B, H / G, s, D], of the same dtype; the draft's slots follow the longest sequence.
        value: like ``key``.
        view: what the nodes see.
        scale: multiplies the scores.

    Returns:
        [B, n, H, D]; zeros for a node that sees nothing.
    """
    batch, heads, n, size = query.shape
    out = query.new_empty((batch, n, heads, size))
    strides = query.stride()[:3]
    _attend(query, key, value, view, scale, out, None, (batch, n, heads, key.shape[2]), strides)
    return out


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    view: TreeView,
    scale: float,
    out: Tensor,
    pages: Pages,
) -> None:
    """Attend with the nodes of an engine's step; the keys of all its tokens are in the cache.

    Args:
        query: [t, H, D], of all tokens; entries of a head are contiguous.
        key: [blocks, H / G, slots of a block, D], of the same dtype, and likewise.
        value: like ``key``.
        view: what the nodes see: lengths of B rows with their queries, positions int64 [t], paths
            [B, m, m] and depths [B, m] for any m from ``pages.most`` on.
        scale: multiplies the scores.
        out: [t, H · D], contiguous; changed for the rows that are not left out.
        pages: of the step.
    """
    heads = query.shape[1]
    shape = (len(pages.starts) - 1, pages.most, heads, pages.longest)
    _attend(query, key, value, view, scale, out, pages, shape, (0, *query.stride()[1::-1]))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    view: TreeView,
    scale: float,
    out: Tensor,
    pages: Pages | None,
    shape: tuple[int, int, int, int],
    strides: tuple[int, ...],
) -> None:
    """Launch the kernels.

    Args:
        query: with ``strides`` of a row, a head and a node.
        key: see ``attend`` and ``attend_pages``.
        value: likewise.
        view: likewise.
        scale: likewise.
        out: likewise.
        pages: likewise; None: the keys of a row are in one piece.
        shape: rows, nodes, query heads and keys of a row, at most.
        strides: of ``query``.
    """
    batch, n, query_heads, keys = shape
    heads, size = key.shape[1], query.shape[-1]
    group = query_heads // heads
    # Tables of pages need the registers that more keys at once would take.
    memory = shared_memory(query.device) if pages is None else 0
    how = blocks(size, query.dtype, memory)
    spans = next(span for span in count(1) if span_begin(span) >= keys)
    tiles = triton.cdiv(group * n, how.queries)
    of_parts = (batch * heads, spans + 1, group * n)
    parts = query.new_empty((*of_parts, size), dtype=torch.float32)
    tops, totals = query.new_empty((2, *of_parts), dtype=torch.float32)
    starts, tables = (None, None) if pages is None else pages[:2]
    constants = {
        "GROUP": group,
        "D": size,
        "WIDTH": max(16, triton.next_power_of_2(size)),
        "BLOCK": BLOCK,
        "SPAN": SPAN,
        "OCTAVE": OCTAVE,
        "PAGE": 0 if pages is None else key.shape[2],
    }
    launch(
        attend_kernel,
        (tiles * spans + n, batch * heads),
        *(query, key, value, *view[:4], starts, tables, tops, totals, parts),
        *(scale, batch, n, view.depths.shape[1], heads, spans, tiles, view.window.size),
        *(*strides, *key.stride()[:3], *value.stride()[:3]),
        0 if tables is None else tables.stride(0),
        **constants,
        RULE=RULES.index(view.window.rule),
        QUERIES=how.queries,
        KEYS=how.keys,
        PATH_QUERIES=max(16, triton.next_power_of_2(group)),
        PATH_KEYS=PATH_KEYS,
        PRECISION="ieee",
        num_warps=how.warps,
        num_stages=how.stages,
    )
    launch(
        combine_kernel,
        (triton.cdiv(group * n, COMBINED), batch * heads),
        *(view.lengths, view.positions, starts, tops, totals, parts, out, n, heads, spans),
        **constants,
        COMBINED=COMBINED,
        SPANS=max(LEAST_SPANS, triton.next_power_of_2(spans)),
        UNROLLED=UNROLLED,
        num_warps=4,
    )

"""Attention of a draft tree as two Triton kernels: parts of the keys, and their sum.

PyTorch's kernels with a mask read every slot of a cache, keep the keys of a head together in one
program, and repeat keys and values or the mask for the query heads of a group. Here the keys are
split among programs (flash decoding), slots that hold nothing are not read, the query heads of a
group share their keys, and what a node may see follows from lengths, ancestors and positions.

Shapes use B rows of a batch, n nodes, H query heads in groups of G, D entries of a head, s slots.
A program's M queries are numbered g · n + node for head g of its group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from token_recycling.model.gpu.attention import TreeView
from token_recycling.util.launch import launch

RULES = {"full": 0, "sliding": 1, "chunked": 2}  # of windows, as constants of kernels
QUERIES, KEYS = 64, 64  # of a program at once, at most
MERGED = 8  # queries whose parts a program adds
FEWEST_KEYS = 128  # of a program, unless there are fewer
PROGRAMS = 264  # that keep a GPU busy: two for each multiprocessor of an H100


@triton.jit
def _add(
    q,
    keys,
    values,
    key_slot,
    value_slot,
    slot,
    there,
    visible,
    scale,
    top,
    total,
    found,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add some slots to the largest score, the sum of weights and the weighted values so far."""
    entry = tl.arange(0, WIDTH)
    whole = entry < D
    at = slot.to(tl.int64)
    k = tl.load(
        keys + at[None, :] * key_slot + entry[:, None],
        mask=there[None, :] & whole[:, None],
        other=0.0,
    )
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(top - base)
    v = tl.load(
        values + at[:, None] * value_slot + entry[None, :],
        mask=there[:, None] & whole[None, :],
        other=0.0,
    )
    found = found * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * kept + tl.sum(weights, 1), found


@triton.jit
def _attend(
    query,
    key,
    value,
    lengths,
    positions,
    ancestors,
    sums_out,
    tops_out,
    totals_out,
    scale,
    batch,
    n,
    heads,
    splits,
    size,
    query_row,
    query_head,
    query_node,
    key_row,
    key_head,
    key_slot,
    value_row,
    value_head,
    value_slot,
    GROUP: tl.constexpr,
    RULE: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with some queries of a group to a part of its keys; the first part has the draft too.

    Writes, per query, the largest score, the sum of exp(score - largest), and the values weighted
    by these; -inf and 0 if it sees none of the keys.
    """
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    split = tl.program_id(2)
    place = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inside = place < GROUP * n
    node = place % n
    rows = tl.arange(0, ROWS)
    end = tl.max(tl.load(lengths + rows, mask=rows < batch, other=0), 0).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    chunk = (tl.cdiv(end, splits) + KEYS - 1) // KEYS * KEYS
    begin = split * chunk
    stop = tl.minimum(begin + chunk, length)
    if RULE == 1:  # no node sees a slot before the window of the row's end
        begin = tl.maximum(begin, tl.maximum(length - size, 0).to(tl.int32) // KEYS * KEYS)
    position = tl.load(positions + row * n + node, mask=inside, other=0).to(tl.int32)
    entry = tl.arange(0, WIDTH)
    whole = entry < D
    own = query + row.to(tl.int64) * query_row + (head * GROUP + place // n) * query_head
    own = own + node * query_node
    q = tl.load(own[:, None] + entry[None, :], mask=inside[:, None] & whole[None, :], other=0.0)
    keys = key + row.to(tl.int64) * key_row + head.to(tl.int64) * key_head
    values = value + row.to(tl.int64) * value_row + head.to(tl.int64) * value_head
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(begin, stop, KEYS):  # committed slots
        slot = start + tl.arange(0, KEYS)
        there = slot < stop
        visible = inside[:, None] & there[None, :]
        if RULE == 1:
            visible = visible & (position[:, None] - slot[None, :] < size)
        elif RULE == 2:
            visible = visible & (position[:, None] // size == slot[None, :] // size)
        top, total, found = _add(
            q, keys, values, key_slot, value_slot, slot, there, visible, scale,
            top, total, found, D, WIDTH, PRECISION,
        )  # fmt: skip
    for first in range(0, tl.where(split == 0, n, 0), KEYS):  # the draft
        child = first + tl.arange(0, KEYS)
        there = child < n
        visible = inside[:, None] & there[None, :]
        above = ancestors + (row * n + node[:, None]) * n + child[None, :]
        visible = visible & (tl.load(above, mask=visible, other=0) != 0)
        if RULE != 0:
            seen = tl.load(positions + row * n + child, mask=there, other=0).to(tl.int32)
            if RULE == 1:
                visible = visible & (position[:, None] - seen[None, :] < size)
            else:
                visible = visible & (position[:, None] // size == seen[None, :] // size)
        top, total, found = _add(
            q, keys, values, key_slot, value_slot, end + child, there, visible, scale,
            top, total, found, D, WIDTH, PRECISION,
        )  # fmt: skip
    out = (tl.program_id(1).to(tl.int64) * splits + split) * (GROUP * n) + place
    tl.store(tops_out + out, top, mask=inside)
    tl.store(totals_out + out, total, mask=inside)
    tl.store(
        sums_out + out[:, None] * D + entry[None, :],
        found,
        mask=inside[:, None] & whole[None, :],
    )


@triton.jit
def _merge(
    sums,
    tops,
    totals,
    found_out,
    n,
    heads,
    splits,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Add the parts of some queries: their weights are relative to their own largest scores."""
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    place = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inside = place < GROUP * n
    entry = tl.arange(0, WIDTH)
    whole = entry < D
    first = tl.program_id(1).to(tl.int64) * splits * (GROUP * n) + place
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    for split in range(0, splits):
        at = first + split * (GROUP * n)
        top = tl.maximum(top, tl.load(tops + at, mask=inside, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, WIDTH], tl.float32)
    for split in range(0, splits):
        at = first + split * (GROUP * n)
        own = tl.load(tops + at, mask=inside, other=float("-inf"))
        weight = tl.exp(own - base)
        total += weight * tl.load(totals + at, mask=inside, other=0.0)
        part = tl.load(
            sums + at[:, None] * D + entry[None, :],
            mask=inside[:, None] & whole[None, :],
            other=0.0,
        )
        found += weight[:, None] * part
    found = found / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (row.to(tl.int64) * n + place % n) * (heads * GROUP) + head * GROUP + place // n
    tl.store(
        found_out + at[:, None] * D + entry[None, :],
        found.to(found_out.dtype.element_ty),
        mask=inside[:, None] & whole[None, :],
    )


class Blocks(NamedTuple):
    """How a program works.

    Attributes:
        queries: at once.
        keys: at once.
        warps: of a program.
        stages: of loads ahead of their use; None: Triton's default.
    """

    queries: int
    keys: int
    warps: int
    stages: int | None = None


def blocks(n: int, group: int, size: int, dtype: torch.dtype) -> Blocks:
    """Return how programs attend: dot products need 16 of everything, registers are few."""
    half = dtype != torch.float32
    wide = 128 if half else 64  # entries of a head up to which registers hold all queries
    most = QUERIES if size <= wide else QUERIES // 2 if size <= 128 else QUERIES // 4
    queries = min(most, max(16, triton.next_power_of_2(group * n)))
    keys = KEYS if size <= 64 else KEYS // 2
    if half and size > 64 and queries == QUERIES:
        return Blocks(queries, keys, 4, 3)  # of eight ways the fastest on an H100
    return Blocks(queries, keys, 8 if queries > 16 else 4)


def options(how: Blocks) -> dict[str, int]:
    """Return a launch's options."""
    return {"num_warps": how.warps} | ({} if how.stages is None else {"num_stages": how.stages})


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    view: TreeView,
    scale: float,
    how: Blocks | None = None,
) -> Tensor:
    """Attend with the nodes of drafts.

    Args:
        query: [B, H, n, D], float16, bfloat16 or float32; entries of a head are contiguous.
        key: [B, H / G, s, D], of the same dtype; the draft's slots follow the longest row.
        value: like ``key``.
        view: what the nodes see.
        scale: multiplies the scores.
        how: how programs work; None: see ``blocks``.

    Returns:
        [B, n, H, D]; zeros for a node that sees nothing.
    """
    batch, count, n, size = query.shape
    heads, slots = key.shape[1], key.shape[2]
    group = count // heads
    how = how or blocks(n, group, size, query.dtype)
    parts = triton.cdiv(group * n, how.queries)
    # At most as many programs as run at once: one more would take as long as all of them.
    splits = min(triton.cdiv(slots, FEWEST_KEYS), PROGRAMS // (parts * batch * heads))
    splits = max(1, splits)
    shape = (batch * heads, splits, group * n)
    sums = query.new_empty((*shape, size), dtype=torch.float32)
    tops, totals = query.new_empty((2, *shape), dtype=torch.float32)
    found = query.new_empty((batch, n, count, size))
    width = max(16, triton.next_power_of_2(size))
    launch(
        _attend,
        (parts, batch * heads, splits),
        query,
        key,
        value,
        view.lengths,
        view.positions,
        view.ancestors,
        sums,
        tops,
        totals,
        scale,
        batch,
        n,
        heads,
        splits,
        view.window.size,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        GROUP=group,
        RULE=RULES[view.window.rule],
        ROWS=triton.next_power_of_2(batch),
        D=size,
        WIDTH=width,
        QUERIES=how.queries,
        KEYS=how.keys,
        PRECISION="ieee",
        **options(how),
    )
    launch(
        _merge,
        (triton.cdiv(group * n, MERGED), batch * heads),
        sums,
        tops,
        totals,
        found,
        n,
        heads,
        splits,
        GROUP=group,
        D=size,
        WIDTH=width,
        QUERIES=MERGED,
        num_warps=4,
    )
    return found

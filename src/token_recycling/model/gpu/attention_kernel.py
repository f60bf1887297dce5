"""Attention of a draft tree as two Triton kernels; a node has the bits of a step of its own.

PyTorch's kernels with a mask read every slot of a cache, keep the keys of a head together in one
program, and repeat keys and values or the mask for the query heads of a group. Here the keys are
split among programs (flash decoding), slots that hold nothing are not read, and the query heads of
a group share their keys.

Which keys are added together, and in which order, follows from a node's position alone: neither
the other nodes, nor the sequences of a batch, nor the size of the cache or the GPU change a bit. A
node at position p sees p + 1 keys: those committed and its path. ``attend_shared`` attends, for
many nodes at once, to whole blocks of ``BLOCK`` keys, divided into spans; ``attend_path`` to the
last ``BLOCK`` to 2 · ``BLOCK`` - 1 keys of one node, in the order of its path, and adds the spans.
All of a draft's nodes are among the latter unless it is deeper than ``BLOCK``. Spans are short at
first, for many programs at short contexts, and longer behind, for few sums at long ones.

Shapes use B sequences of a batch, n nodes, H query heads in groups of G, D entries of a head, s
slots. A program's queries are numbered g · n + node for head g of its group.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from token_recycling.model.gpu.attention import TreeView
from token_recycling.model.limits import AttentionWindow
from token_recycling.util.launch import launch

RULES = {"full": 0, "sliding": 1, "chunked": 2}  # of windows, as constants of kernels
QUERIES, KEYS = 64, 64  # of a program at once, at most; KEYS divides BLOCK
BLOCK = 64  # keys; a multiple of it divides the keys between the kernels
SPAN = 256  # keys of each of the first OCTAVE spans, a multiple of BLOCK; then twice as many
OCTAVE = 8  # spans of one length
PATH_KEYS = 64  # of ``_attend_path`` at once
MERGED = 2**14  # numbers of spans that it adds at once
PATH_WARPS = 4
VARYING = ["n", "batch", "spans"]  # arguments whose values no variant of a kernel is compiled for


@triton.jit
def _paths(ancestors, paths, depths, n, NODES: tl.constexpr):
    """Write the ancestors of one node as a list, and their number."""
    row = tl.program_id(0) * n
    node = tl.arange(0, NODES)
    above = tl.load(ancestors + row + node, mask=node < n, other=0).to(tl.int32)
    tl.store(paths + row + tl.cumsum(above, 0) - 1, node, mask=above != 0)
    tl.store(depths + tl.program_id(0), tl.sum(above, 0))


@triton.jit
def _add_keys(
    q,
    keys,
    values,
    key_slot,
    value_slot,
    slot,
    valid,
    visible,
    scale,
    top,
    total,
    sums,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add some slots to the largest score, the sum of weights and the weighted values so far."""
    entry = tl.arange(0, WIDTH)
    in_head = entry < D
    slot = slot.to(tl.int64)
    k = tl.load(
        keys + slot[None, :] * key_slot + entry[:, None],
        mask=valid[None, :] & in_head[:, None],
        other=0.0,
    )
    v = tl.load(
        values + slot[:, None] * value_slot + entry[None, :],
        mask=valid[:, None] & in_head[None, :],
        other=0.0,
    )
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    kept = tl.exp(top - base)
    sums = sums * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * kept + tl.sum(weights, 1), sums


@triton.jit
def _in_window(position, other, size, RULE: tl.constexpr):
    """Return whether a query at ``position`` may see a key at position ``other`` before it."""
    if RULE == 1:
        visible = position - other < size
    elif RULE == 2:
        visible = position // size == other // size
    else:
        visible = other == other
    return visible


@triton.jit
def _shared_keys(position, length, BLOCK: tl.constexpr):
    """Return how many keys a node at ``position`` leaves to ``_attend_shared``."""
    whole = ((position + 1) // BLOCK - 1) * BLOCK
    return tl.minimum(tl.maximum(whole, 0), length // BLOCK * BLOCK)


@triton.jit
def _span_begin(span, SPAN: tl.constexpr, OCTAVE: tl.constexpr):
    """Return the first key of a span (see ``span_begin``)."""
    octave = span // OCTAVE
    return (((1 << octave) - 1) * OCTAVE + ((span % OCTAVE) << octave)) * SPAN


@triton.jit(do_not_specialize=VARYING)
def _attend_shared(
    query,
    key,
    value,
    lengths,
    positions,
    tops_out,
    totals_out,
    sums_out,
    scale,
    n,
    heads,
    spans,
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
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    OCTAVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with some queries of a group to one span of committed keys.

    Writes, per query, the largest score, the sum of exp(score - largest), and the values weighted
    by these; -inf and 0 if it sees none of the keys. Nothing reads spans behind a sequence's end.
    """
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    span = spans - 1 - tl.program_id(2)  # the longest first
    place = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    inside = place < GROUP * n
    node = place % n
    length = tl.load(lengths + row).to(tl.int32)
    position = tl.load(positions + row * n + node, mask=inside, other=0).to(tl.int32)
    limit = tl.where(inside, _shared_keys(position, length, BLOCK), 0)
    begin = _span_begin(span, SPAN, OCTAVE)
    stop = tl.minimum(_span_begin(span + 1, SPAN, OCTAVE), tl.max(limit, 0))
    if begin < stop:
        if RULE == 1:  # no node sees a slot before the window of the sequence's end
            begin = tl.maximum(begin, tl.maximum(length - size, 0).to(tl.int32) // KEYS * KEYS)
        entry = tl.arange(0, WIDTH)
        in_head = entry < D
        own = query + row.to(tl.int64) * query_row + (head * GROUP + place // n) * query_head
        own = own + node * query_node
        q = tl.load(
            own[:, None] + entry[None, :], mask=inside[:, None] & in_head[None, :], other=0.0
        )
        keys = key + row.to(tl.int64) * key_row + head.to(tl.int64) * key_head
        values = value + row.to(tl.int64) * value_row + head.to(tl.int64) * value_head
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, WIDTH], tl.float32)
        for start in range(begin, stop, KEYS):
            slot = start + tl.arange(0, KEYS)
            visible = slot[None, :] < limit[:, None]
            visible = visible & _in_window(position[:, None], slot[None, :], size, RULE)
            top, total, sums = _add_keys(
                q, keys, values, key_slot, value_slot, slot, slot < stop, visible, scale,
                top, total, sums, D, WIDTH, PRECISION,
            )  # fmt: skip
        out = (tl.program_id(1).to(tl.int64) * spans + span) * (GROUP * n) + place
        tl.store(tops_out + out, top, mask=inside)
        tl.store(totals_out + out, total, mask=inside)
        tl.store(
            sums_out + out[:, None] * D + entry[None, :],
            sums,
            mask=inside[:, None] & in_head[None, :],
        )


@triton.jit(do_not_specialize=VARYING)
def _attend_path(
    query,
    key,
    value,
    lengths,
    positions,
    paths,
    depths,
    tops,
    totals,
    sums_in,
    out,
    scale,
    batch,
    n,
    heads,
    spans,
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
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    OCTAVE: tl.constexpr,
    MERGED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with one node's queries of a group to its last keys; add the spans before them."""
    node = tl.program_id(0)
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    member = tl.arange(0, QUERIES)
    inside = member < GROUP
    rows = tl.arange(0, ROWS)
    draft = tl.max(tl.load(lengths + rows, mask=rows < batch, other=0), 0).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    position = tl.load(positions + row * n + node).to(tl.int32)
    shared = _shared_keys(position, length, BLOCK)
    stop = length + tl.load(depths + row * n + node)
    entry = tl.arange(0, WIDTH)
    in_head = entry < D
    own = query + row.to(tl.int64) * query_row + (head * GROUP + member) * query_head
    own = own + node * query_node
    q = tl.load(own[:, None] + entry[None, :], mask=inside[:, None] & in_head[None, :], other=0.0)
    keys = key + row.to(tl.int64) * key_row + head.to(tl.int64) * key_head
    values = value + row.to(tl.int64) * value_row + head.to(tl.int64) * value_head
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    first_span = 0
    for start in range(shared, stop, KEYS):
        number = start + tl.arange(0, KEYS)  # of a key on the path from the first token
        valid = number < stop
        drafted = valid & (number >= length)
        step = tl.load(paths + (row * n + node) * n + number - length, mask=drafted, other=0)
        slot = tl.where(drafted, draft + step, number)
        visible = valid
        if RULE != 0:
            other = tl.load(positions + row * n + step, mask=drafted, other=0).to(tl.int32)
            other = tl.where(drafted, other, number)
            visible = visible & _in_window(position, other, size, RULE)
        top, total, sums = _add_keys(
            q, keys, values, key_slot, value_slot, slot, valid,
            inside[:, None] & visible[None, :], scale, top, total, sums, D, WIDTH, PRECISION,
        )  # fmt: skip
    first = tl.program_id(1).to(tl.int64) * spans
    while _span_begin(first_span, SPAN, OCTAVE) < shared:
        span = first_span + tl.arange(0, MERGED)
        read = inside[None, :] & (_span_begin(span, SPAN, OCTAVE) < shared)[:, None]
        at = (first + span)[:, None] * (GROUP * n) + (member * n + node)[None, :]
        span_tops = tl.load(tops + at, mask=read, other=float("-inf"))
        higher = tl.maximum(top, tl.max(span_tops, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, weights = tl.exp(top - base), tl.exp(span_tops - base[None, :])
        parts = tl.load(
            sums_in + at[:, :, None] * D + entry[None, None, :],
            mask=read[:, :, None] & in_head[None, None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(tl.load(totals + at, mask=read, other=0.0) * weights, 0)
        sums = sums * kept[:, None] + tl.sum(parts * weights[:, :, None], 0)
        top = higher
        first_span += MERGED
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (row.to(tl.int64) * n + node) * (heads * GROUP) + head * GROUP + member
    tl.store(
        out + at[:, None] * D + entry[None, :],
        sums.to(out.dtype.element_ty),
        mask=inside[:, None] & in_head[None, :],
    )


class Blocks(NamedTuple):
    """How a program of ``_attend_shared`` works; the same for drafts of every size.

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


def blocks(size: int, dtype: torch.dtype) -> Blocks:
    """Return how programs attend with heads of ``size`` entries: registers are few."""
    if dtype != torch.float32:
        if size <= 128:
            return Blocks(QUERIES, KEYS if size <= 64 else KEYS // 2, 4, 3)
        return Blocks(QUERIES // 4, KEYS // 2, 4, 2)
    queries = QUERIES if size <= 64 else QUERIES // 2 if size <= 128 else QUERIES // 4
    return Blocks(queries, KEYS if size <= 64 else KEYS // 2, 8 if queries > 16 else 4, 2)


def view_tree(
    lengths: Tensor, positions: Tensor, ancestors: Tensor, windows: Iterable[AttentionWindow]
) -> list[TreeView]:
    """Return what the nodes of drafts see, for each of ``windows``.

    Args:
        lengths: int64 [B], committed entries; the draft follows the longest sequence.
        positions: int64 [B, n], of the nodes.
        ancestors: bool [B, n, n]; each node is its own ancestor, and follows its parent.
        windows: of the layers.
    """
    batch, n, _ = ancestors.shape
    paths = torch.zeros(batch, n, n, dtype=torch.int32, device=ancestors.device)
    depths = torch.empty(batch, n, dtype=torch.int32, device=ancestors.device)
    nodes = max(2, triton.next_power_of_2(n))
    launch(_paths, (batch * n,), ancestors.contiguous(), paths, depths, n, NODES=nodes, num_warps=1)
    return [TreeView(lengths, positions, paths, depths, window) for window in windows]


def span_begin(span: int) -> int:
    """Return the first key of a span: ``OCTAVE`` have ``SPAN`` keys, as many twice as many, …"""
    octave, number = divmod(span, OCTAVE)
    return ((2**octave - 1) * OCTAVE + number * 2**octave) * SPAN


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
        key: [B, H / G, s, D], of the same dtype; the draft's slots follow the longest sequence.
        value: like ``key``.
        view: what the nodes see.
        scale: multiplies the scores.
        how: how programs work; None: see ``blocks``.

    Returns:
        [B, n, H, D]; zeros for a node that sees nothing.
    """
    batch, query_heads, n, size = query.shape
    heads, slots = key.shape[1], key.shape[2]
    group = query_heads // heads
    how = how or blocks(size, query.dtype)
    spans = next(span for span in count(1) if span_begin(span) >= slots)
    shape = (batch * heads, spans, group * n)
    sums = query.new_empty((*shape, size), dtype=torch.float32)
    tops, totals = query.new_empty((2, *shape), dtype=torch.float32)
    out = query.new_empty((batch, n, query_heads, size))
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3])
    width, members = max(16, triton.next_power_of_2(size)), max(16, triton.next_power_of_2(group))
    constants = {
        "GROUP": group,
        "RULE": RULES[view.window.rule],
        "D": size,
        "WIDTH": width,
        "BLOCK": BLOCK,
        "SPAN": SPAN,
        "OCTAVE": OCTAVE,
        "PRECISION": "ieee",
    }
    launch(
        _attend_shared,
        (triton.cdiv(group * n, how.queries), batch * heads, spans),
        *(query, key, value, view.lengths, view.positions),
        *(tops, totals, sums),
        *(scale, n, heads, spans, view.window.size, *strides),
        **constants,
        QUERIES=how.queries,
        KEYS=how.keys,
        num_warps=how.warps,
        num_stages=how.stages,
    )
    launch(
        _attend_path,
        (n, batch * heads),
        *(query, key, value, view.lengths, view.positions, view.paths, view.depths),
        *(tops, totals, sums, out),
        *(scale, batch, n, heads, spans, view.window.size, *strides),
        **constants,
        QUERIES=members,
        KEYS=PATH_KEYS,
        MERGED=max(1, MERGED // (members * width)),
        ROWS=triton.next_power_of_2(batch),
        num_warps=PATH_WARPS,
        num_stages=2,
    )
    return out

"""Attention of a draft tree as two Triton kernels; a node has the bits of a step of its own.

PyTorch's kernels with a mask read every slot of a cache, keep the keys of a head together in one
program, and repeat keys and values or the mask for the query heads of a group. Here the keys are
split among programs (flash decoding), slots that hold nothing are not read, and the query heads of
a group share their keys.

Which keys are added together, and in which order, follows from a node's position alone: neither
the other nodes, nor the sequences of a batch, nor the size of the cache change a bit. A node at
position p sees p + 1 keys: those committed and its path. Whole blocks of ``BLOCK`` keys,
divided into spans, are read by programs that attend for many nodes at once; the last ``BLOCK`` to
2 · ``BLOCK`` - 1 keys by a program of the node's own, in the order of its path. All keys of a
draft are among these unless it is deeper than ``BLOCK``. The first spans are short, so that short
contexts have several programs; later ones are longer, so that long ones have few to combine.

Shapes use B sequences of a batch, n nodes, H query heads in groups of G, D entries of a head, s
slots. A program's queries are numbered g · n + node for head g of its group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from skinny_kernels.gpu.vector import longest

# Arguments whose values no variant of a kernel is compiled for
VARYING = ["n", "room", "batch", "spans", "tiles", "blocks_row"]


@triton.jit
def _add_keys(
    q,
    keys,
    values,
    key_row,
    key_slot,
    value_row,
    value_slot,
    blocks,
    slot,
    valid,
    visible,
    scale,
    top,
    total,
    sums,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add some slots to the largest score, the sum of weights and the weighted values so far."""
    entry = tl.arange(0, WIDTH)
    in_head = entry < D
    slot = slot.to(tl.int64)
    key, value = slot * key_slot, slot * value_slot
    if PAGE:
        block = tl.load(blocks + slot // PAGE, mask=valid, other=0).to(tl.int64)
        key = block * key_row + slot % PAGE * key_slot
        value = block * value_row + slot % PAGE * value_slot
    k = tl.load(
        keys + key[None, :] + entry[:, None],
        mask=valid[None, :] & in_head[:, None],
        other=0.0,
    )
    v = tl.load(
        values + value[:, None] + entry[None, :],
        mask=valid[:, None] & in_head[None, :],
        other=0.0,
    )
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    rescale = tl.exp(top - base)
    sums = sums * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return higher, total * rescale + tl.sum(weights, 1), sums


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
    """Return how many keys a node at ``position`` shares with programs for many nodes."""
    shared = ((position + 1) // BLOCK - 1) * BLOCK
    return tl.minimum(tl.maximum(shared, 0), length // BLOCK * BLOCK)


@triton.jit
def _span_begin(span, SPAN: tl.constexpr, OCTAVE: tl.constexpr):
    """Return the first key of a span (see ``span_begin``)."""
    octave = span // OCTAVE
    return (((1 << octave) - 1) * OCTAVE + ((span % OCTAVE) << octave)) * SPAN


@triton.jit
def _load_queries(
    query, query_head, query_node, member, node, inside, D: tl.constexpr, WIDTH: tl.constexpr
):
    """Load queries of some heads and nodes, [QUERIES, WIDTH]."""
    entry = tl.arange(0, WIDTH)
    pointers = query + member * query_head + node * query_node
    mask = inside[:, None] & (entry < D)[None, :]
    return tl.load(pointers[:, None] + entry[None, :], mask=mask, other=0.0)


@triton.jit
def _store_part(
    tops, totals, parts, at, inside, top, total, sums, D: tl.constexpr, WIDTH: tl.constexpr
):
    """Store what some queries have seen of a span."""
    entry = tl.arange(0, WIDTH)
    tl.store(tops + at, top, mask=inside)
    tl.store(totals + at, total, mask=inside)
    mask = inside[:, None] & (entry < D)[None, :]
    tl.store(parts + at[:, None] * D + entry[None, :], sums, mask=mask)


@triton.jit
def _attend_shared(
    number, tiles, query, query_head, query_node, keys, values, key_row, key_slot, value_row,
    value_slot, blocks, positions, length, nodes, n, spans, size, scale, tops, totals, parts,
    GROUP: tl.constexpr, RULE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    OCTAVE: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with some queries of a group to a span of committed keys."""
    span = spans - 1 - number // tiles  # the longest first
    place = number % tiles * QUERIES + tl.arange(0, QUERIES)
    node = place % n
    inside = (place < GROUP * n) & (node < nodes)
    position = tl.load(positions + node, mask=inside, other=0).to(tl.int32)
    limit = tl.where(inside, _shared_keys(position, length, BLOCK), 0)
    begin = _span_begin(span, SPAN, OCTAVE)
    stop = tl.minimum(_span_begin(span + 1, SPAN, OCTAVE), tl.max(limit, 0))
    if begin < stop:
        if RULE == 1:  # no node sees a slot before the window of the sequence's end
            begin = tl.maximum(begin, tl.maximum(length - size, 0).to(tl.int32) // KEYS * KEYS)
        q = _load_queries(query, query_head, query_node, place // n, node, inside, D, WIDTH)
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        sums = tl.zeros([QUERIES, WIDTH], tl.float32)
        for start in range(begin, stop, KEYS):
            slot = start + tl.arange(0, KEYS)
            visible = slot[None, :] < limit[:, None]
            visible = visible & _in_window(position[:, None], slot[None, :], size, RULE)
            top, total, sums = _add_keys(
                q, keys, values, key_row, key_slot, value_row, value_slot, blocks, slot,
                slot < stop, visible, scale, top, total, sums, D, WIDTH, PAGE, PRECISION,
            )  # fmt: skip
        at = span * (GROUP * n) + place
        _store_part(tops, totals, parts, at, inside, top, total, sums, D, WIDTH)


@triton.jit
def _attend_path(
    node, draft, query, query_head, query_node, keys, values, key_row, key_slot, value_row,
    value_slot, blocks, positions, length, path, depth, n, spans, size, scale, tops, totals, parts,
    GROUP: tl.constexpr, RULE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with one node's queries of a group to its last keys; ``draft`` is its first slot."""
    member = tl.arange(0, QUERIES)
    inside = member < GROUP
    position = tl.load(positions + node).to(tl.int32)
    stop = length + depth
    q = _load_queries(query, query_head, query_node, member, node, inside, D, WIDTH)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    shared = _shared_keys(position, length, BLOCK)
    for start in tl.range(shared, stop, KEYS, num_stages=2):
        place = start + tl.arange(0, KEYS)  # on the path from the first token
        valid = place < stop
        drafted = valid & (place >= length)
        step = tl.load(path + place - length, mask=drafted, other=0)
        slot = tl.where(drafted, draft + step, place)
        visible = valid
        if RULE != 0:
            other = tl.load(positions + step, mask=drafted, other=0).to(tl.int32)
            other = tl.where(drafted, other, place)
            visible = visible & _in_window(position, other, size, RULE)
        top, total, sums = _add_keys(
            q, keys, values, key_row, key_slot, value_row, value_slot, blocks, slot, valid,
            inside[:, None] & visible[None, :], scale, top, total, sums,
            D, WIDTH, PAGE, PRECISION,
        )  # fmt: skip
    at = spans * (GROUP * n) + member * n + node
    _store_part(tops, totals, parts, at, inside, top, total, sums, D, WIDTH)


@triton.jit
def _row(lengths, starts, row, n, PAGE: tl.constexpr):
    """Return the first query of a row, its nodes, and its committed keys.

    With pages, rows have any numbers of queries, and ``lengths`` counts these too. A row of more
    than ``n`` is part of a prompt: it has no nodes here.
    """
    if PAGE:
        first = tl.load(starts + row)
        nodes = tl.load(starts + row + 1) - first
        nodes = tl.where(nodes > n, 0, nodes)
        # Graphs are captured with lengths that are too short.
        length = tl.maximum(tl.load(lengths + row).to(tl.int32) - nodes, 0)
    else:
        first = row * n
        nodes = first - first + n  # a number of the same type as above
        length = tl.load(lengths + row).to(tl.int32)
    return first.to(tl.int64), nodes, length


@triton.jit(do_not_specialize=VARYING)
def attend_kernel(
    query,
    key,
    value,
    lengths,
    positions,
    paths,
    depths,
    starts,
    blocks,
    tops,
    totals,
    parts,
    scale,
    batch,
    n,
    room,
    heads,
    spans,
    tiles,
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
    blocks_row,
    GROUP: tl.constexpr,
    RULE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PATH_QUERIES: tl.constexpr,
    PATH_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    OCTAVE: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with some queries to a span of committed keys, or with one node to its last keys.

    Writes, per query, the largest score, the sum of exp(score - largest), and the values weighted
    by these; -inf and 0 if it sees none of the keys. The last keys of a node are span ``spans``;
    nothing reads a span behind those that a node shares (see ``combine_kernel``).

    ``PAGE``: slots of a page; 0: the slots of a row are in one piece. The draft's slots follow the
    row's own keys if there are pages, and those of the longest row otherwise.
    """
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    number = tl.program_id(0)
    begin, nodes, length = _row(lengths, starts, row, n, PAGE)
    query += head * GROUP * query_head
    keys = key + head.to(tl.int64) * key_head
    values = value + head.to(tl.int64) * value_head
    if PAGE:
        query += begin * query_node
        blocks += row.to(tl.int64) * blocks_row
    else:
        query += row.to(tl.int64) * query_row
        keys += row.to(tl.int64) * key_row
        values += row.to(tl.int64) * value_row
    positions += begin
    first = tl.program_id(1).to(tl.int64) * (spans + 1) * (GROUP * n)
    tops += first
    totals += first
    parts += first * D
    if number < tiles * spans:
        _attend_shared(
            number, tiles, query, query_head, query_node, keys, values, key_row, key_slot,
            value_row, value_slot, blocks, positions, length, nodes, n, spans, size, scale,
            tops, totals, parts,
            GROUP, RULE, D, WIDTH, QUERIES, KEYS, BLOCK, SPAN, OCTAVE, PAGE, PRECISION,
        )  # fmt: skip
    else:
        node = number - tiles * spans
        if node < nodes:
            draft = length
            if PAGE == 0:
                draft = longest(lengths, batch).to(tl.int32)
            at = row * room + node
            depth = tl.load(depths + at)
            _attend_path(
                node, draft, query, query_head, query_node, keys, values, key_row, key_slot,
                value_row, value_slot, blocks, positions, length, paths + at * room, depth, n,
                spans, size, scale, tops, totals, parts,
                GROUP, RULE, D, WIDTH, PATH_QUERIES, PATH_KEYS, BLOCK, PAGE, PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def combine_kernel(
    lengths,
    positions,
    starts,
    tops,
    totals,
    parts,
    out,
    n,
    heads,
    spans,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    COMBINED: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    OCTAVE: tl.constexpr,
    PAGE: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Combine the spans of some queries: their weights are relative to their own largest scores."""
    row = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    place = tl.program_id(0) * COMBINED + tl.arange(0, COMBINED)
    start, nodes, length = _row(lengths, starts, row, n, PAGE)
    node = start + place % n
    inside = (place < GROUP * n) & (place % n < nodes)
    entry = tl.arange(0, WIDTH)
    mask = inside[:, None] & (entry < D)[None, :]
    position = tl.load(positions + node, mask=inside, other=0).to(tl.int32)
    limit = tl.where(inside, _shared_keys(position, length, BLOCK), 0)
    span = tl.arange(0, SPANS)
    begin = _span_begin(span, SPAN, OCTAVE)
    first = tl.program_id(1).to(tl.int64) * (spans + 1) * (GROUP * n) + place
    last = first + spans * (GROUP * n)
    read = (begin[:, None] < limit[None, :]) & inside[None, :]
    every = first[None, :] + span[:, None] * (GROUP * n)
    top = tl.load(tops + last, mask=inside, other=float("-inf"))
    highest = tl.max(tl.load(tops + every, mask=read, other=float("-inf")), 0)
    highest = tl.maximum(highest, top)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(top - base)
    total = weight * tl.load(totals + last, mask=inside, other=0.0)
    sums = weight[:, None] * tl.load(
        parts + last[:, None] * D + entry[None, :], mask=mask, other=0.0
    )
    count = tl.sum((begin < tl.max(limit, 0)).to(tl.int32), 0)
    for number in tl.range(0, count, loop_unroll_factor=UNROLLED):
        at = first + number * (GROUP * n)
        begun = inside & (_span_begin(number, SPAN, OCTAVE) < limit)
        weight = tl.exp(tl.load(tops + at, mask=begun, other=float("-inf")) - base)
        total += weight * tl.load(totals + at, mask=begun, other=0.0)
        part = tl.load(
            parts + at[:, None] * D + entry[None, :], mask=mask & begun[:, None], other=0.0
        )
        sums += weight[:, None] * part
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    at = node * (heads * GROUP) + head * GROUP + place // n
    tl.store(out + at[:, None] * D + entry[None, :], sums.to(out.dtype.element_ty), mask=mask)

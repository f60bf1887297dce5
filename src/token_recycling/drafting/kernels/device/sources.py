"""The candidates at nodes, from all sources, and their scores (see ``host.tree.gather``)."""

from __future__ import annotations

import triton
import triton.language as tl

from token_recycling.drafting.kernels.host import rates, state, tree

LEVELS = tl.constexpr(state.LEVELS)
CHAIN, ROOT_ROW = tl.constexpr(state.CHAIN), tl.constexpr(state.ROOT_ROW)
# Bits of these sources in patterns, and of all rows'
CHAIN_BIT, ROOT_BIT = tl.constexpr(1 << state.CHAIN), tl.constexpr(1 << state.ROOT_ROW)
ROW_BITS = tl.constexpr((1 << state.LEVELS) - 1)
RUNNERS_UP = tl.constexpr(state.RUNNERS_UP)
SOURCES = tl.constexpr(state.SOURCES)
SETS, PATTERNS = tl.constexpr(state.SETS), tl.constexpr(state.PATTERNS)
CONSTANT, INPUTS = tl.constexpr(state.CONSTANT), tl.constexpr(state.INPUTS)
BINS = tl.constexpr(rates.BINS)
LONG = tl.constexpr(rates.LONG)
RUNS = tl.constexpr(tuple(rates.RUNS.tolist()))
DEPTHS = tl.constexpr(tuple(rates.DEPTHS.tolist()))
RUN_CLASSES, DEPTH_CLASSES = tl.constexpr(len(rates.RUNS)), tl.constexpr(len(rates.DEPTHS))
LEAST, MOST = tl.constexpr(tree.LEAST), tl.constexpr(tree.MOST)


@triton.jit
def _class_of(value, BOUNDS: tl.constexpr, COUNT: tl.constexpr):
    """Return the index of the last of the bounds that is at most ``value``."""
    index = (value >= BOUNDS[1]).to(tl.int32)
    for i in tl.static_range(2, COUNT):
        index += value >= BOUNDS[i]
    return index


@triton.jit
def locate(level: tl.constexpr, before, last, token, sizes):
    """Return (row, key, True if there is a row) of tokens at a level (see ``host.entries.locate``).

    ``sizes``: V, P and T, int64.
    """
    V, P, T = sizes
    if level == 0:
        return token, token, token >= 0
    pair = last * V + token
    if level == 1:
        return V + pair % tl.maximum(P, 1), pair, (token >= 0) & (last >= 0) & (P > 0)
    key = before * V * V + pair
    present = (token >= 0) & (before >= 0) & (last >= 0) & (T > 0)
    return V + P + key % tl.maximum(T, 1), key, present


@triton.jit
def _best(level: tl.constexpr, row, key, there, tables, sizes, K: tl.constexpr):
    """Return (True if a row holds candidates of this key, bits of its best probability)."""
    same_key = there
    if level > 0:
        same_key = tl.load(tables.keys + row - sizes[0], mask=there, other=0) == key
    best = tl.load(tables.candidates + row * K, mask=there, other=-1)
    bits = tl.load(tables.probabilities + row * K, mask=there, other=0)
    return there & same_key & (best >= 0), bits


@triton.jit
def _by_level(level, third, second, first, chain):
    """Select a value for every node [R] and lane [1, L] by its level; -1 is the chain."""
    by_row = tl.where(
        level == 2, third[:, None], tl.where(level == 1, second[:, None], first[:, None])
    )
    return tl.where(level < 0, chain[:, None], by_row)


@triton.jit
def _weight(of_set, of_pattern, source):
    """Return the weight of a source: that of the node's set plus that of each lane's pattern."""
    return tl.load(of_set + source) + tl.load(of_pattern + source)


@triton.jit
def _group(values, number, ROUND: tl.constexpr, WIDTH: tl.constexpr):
    """Return a group of lanes [WIDTH, R] of [R, 4 · WIDTH]."""
    groups = tl.reshape(values, [ROUND, 4, WIDTH])
    group = tl.sum(tl.where(tl.arange(0, 4)[None, :, None] == number, groups, 0), 1)
    return tl.trans(group)


@triton.jit
def gather(
    before,
    last,
    token,
    below,
    run,
    depth,
    at_root,
    own,
    roots,
    tables,
    sizes,
    ROUND: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Unite the candidates of all sources at R nodes, and mix what these say of each.

    ``FEATURES``: see ``host.rates.feature_offsets``; ``own``: the state; others: as in
    ``host.tree.gather``.

    The candidates of a level are ``WIDTH`` lanes, those of triples first; the chain's token is on
    the first lane behind them, and those of the root row follow. This is the order in which
    that function finds them. A candidate of several sources has the same log odds on each of its
    lanes. Numbers of variables are those of the sources in ``host.state``: ``bits4`` are of the
    root row.

    Memory is read in three steps, each of which needs the one before: keys and rows, classes of
    probabilities, log odds and weights.

    Returns:
        Per node and lane, [R, 4 · WIDTH]: candidate (-1: none), first lane of its candidate or not,
        log odds, feature, log odds of the feature, source, and weight set of the candidate's
        pattern. Then, by source, [R]: the feature of candidates that it lacks, its log odds, and
        whether the source is there. Then the weight set of each node, [R].
    """
    lane = tl.arange(0, 4 * WIDTH)[None, :]
    level = 2 - lane // WIDTH
    rank = lane % WIDTH
    # Rows and keys
    row2, key2, has2 = locate(2, before, last, token, sizes)
    row1, key1, has1 = locate(1, before, last, token, sizes)
    row0, key0, has0 = locate(0, before, last, token, sizes)
    present2, bits2 = _best(2, row2, key2, has2, tables, sizes, K)
    present1, bits1 = _best(1, row1, key1, has1, tables, sizes, K)
    present0, bits0 = _best(0, row0, key0, has0, tables, sizes, K)
    root_ids, root_p = roots.candidates + own * (K - 1), roots.probabilities + own * (K - 1)
    present4 = at_root & (K > 1)
    present4 = present4 & (tl.load(root_ids + 0 * token, mask=present4, other=-1) >= 0)
    bits4 = tl.load(root_p + 0 * token, mask=present4, other=0)
    present3 = below >= 0
    none = tl.zeros([ROUND], tl.int32)
    row = _by_level(level, row2, row1, row0, none)
    has = _by_level(level, has2.to(tl.int32), has1.to(tl.int32), has0.to(tl.int32), none) != 0
    inside = has & (rank < K)
    ids = tl.load(tables.candidates + row * K + rank, mask=inside, other=-1)
    bits = tl.load(tables.probabilities + row * K + rank, mask=inside, other=0)
    in_root_row = at_root[:, None] & (level < 0) & (rank > 0) & (rank < K)
    of_root = tl.load(root_ids + 0 * row + rank - 1, mask=in_root_row, other=-1)
    bits = tl.where(
        in_root_row, tl.load(root_p + 0 * row + rank - 1, mask=in_root_row, other=0), bits
    )
    present = _by_level(
        level,
        present2.to(tl.int32),
        present1.to(tl.int32),
        present0.to(tl.int32),
        present4.to(tl.int32),
    )
    ids = tl.where(in_root_row, of_root, ids)
    ids = tl.where(present != 0, ids, -1)
    chained = (level < 0) & (rank == 0) & present3[:, None]
    ids = tl.where(chained, below[:, None].to(tl.int32), ids)
    valid = ids >= 0
    source = tl.where(level >= 0, level, tl.where(rank > 0, ROOT_ROW, CHAIN))
    # Features
    lacking = FEATURES[0]
    chain = FEATURES[1]
    beside = FEATURES[2]
    nothing = FEATURES[3]
    root_level = RUNNERS_UP + (tl.load(roots.rejected + own) != 0).to(tl.int32)
    length = _class_of(run, RUNS, RUN_CLASSES)
    kind = tl.where(level >= 0, level * K + rank, root_level * K + rank - 1) * BINS
    kind += tl.load(tables.classes + bits, mask=valid, other=0)
    step = _class_of(depth, DEPTHS, DEPTH_CLASSES)[:, None]
    kind = tl.where(chained, chain + length * DEPTH_CLASSES + step, kind)
    best2 = tl.load(tables.classes + bits2, mask=present2, other=0)
    best1 = tl.load(tables.classes + bits1, mask=present1, other=0)
    best0 = tl.load(tables.classes + bits0, mask=present0, other=0)
    best4 = tl.load(tables.classes + bits4, mask=present4, other=0)
    lack2 = tl.where(present2, lacking + 2 * BINS + best2, nothing)
    lack1 = tl.where(present1, lacking + BINS + best1, nothing)
    lack0 = tl.where(present0, lacking + best0, nothing)
    lack3 = tl.where(present3, beside + length, nothing)
    lack4 = tl.where(present4, lacking + root_level * BINS + best4, nothing)
    logit = tl.load(tables.logits + kind, mask=valid, other=0.0)
    logit2 = tl.load(tables.logits + lack2)
    logit1 = tl.load(tables.logits + lack1)
    logit0 = tl.load(tables.logits + lack0)
    logit3 = tl.load(tables.logits + lack3)
    logit4 = tl.load(tables.logits + lack4)
    # The bits of a candidate's sources; it counts on the lane of the first one. A damaged row that
    # has a candidate twice must not exceed them.
    groups = (
        _group(ids + 1, 0, ROUND, WIDTH) - 1,
        _group(ids + 1, 1, ROUND, WIDTH) - 1,
        _group(ids + 1, 2, ROUND, WIDTH) - 1,
        _group(ids + 1, 3, ROUND, WIDTH) - 1,
    )
    pattern = tl.zeros([ROUND, 4 * WIDTH], tl.int32)
    for number in tl.static_range(4):
        group_ids = groups[number][:, :, None]
        bits_of = tl.where(tl.arange(0, WIDTH) == 0, CHAIN_BIT, ROOT_BIT)[:, None, None]
        if number < 3:
            bits_of = tl.full([1, 1, 1], 4 >> number, tl.int32)
        pattern += tl.sum(
            tl.where((ids[None, :, :] == group_ids) & (group_ids >= 0), bits_of, 0), 0
        )
    # Rows come from the longest context on, then the chain, then the root row.
    earlier = tl.where(source < CHAIN, ROW_BITS & ~((2 << source) - 1), (1 << source) - 1)
    first = valid & ((pattern & earlier) == 0)
    pattern = SETS + tl.minimum(pattern, PATTERNS - 1)
    # The mixture: as if all sources lacked a candidate, plus what those say that have it.
    state = tl.where(present3, tl.where(run >= LONG, 2, 1), 0)
    which = (present1.to(tl.int32) + 2 * present2.to(tl.int32)) * 3 + state
    of_set = (tables.rounded + which * INPUTS)[:, None]
    of_pattern = tables.rounded + pattern * INPUTS
    weight = _weight(of_set, of_pattern, source)
    beyond = _by_level(level, logit2, logit1, logit0, logit4)
    beyond = tl.where(chained, logit3[:, None], beyond)
    more = tl.where(valid, weight * (logit - beyond), 0.0)
    odds = _weight(of_set, of_pattern, 0) * logit0[:, None]
    odds += _weight(of_set, of_pattern, 1) * logit1[:, None]
    odds += _weight(of_set, of_pattern, 2) * logit2[:, None]
    odds += _weight(of_set, of_pattern, 3) * logit3[:, None]
    odds += _weight(of_set, of_pattern, 4) * logit4[:, None]
    odds += _weight(of_set, of_pattern, CONSTANT)
    for number in tl.static_range(4):
        group_ids = groups[number][:, :, None]
        group_more = _group(more, number, ROUND, WIDTH)[:, :, None]
        odds += tl.sum(
            tl.where((ids[None, :, :] == group_ids) & (group_ids >= 0), group_more, 0.0), 0
        )
    odds = tl.minimum(tl.maximum(odds, LEAST), MOST)
    source = tl.where(valid, source, -1)
    lacks = (lack0, lack1, lack2, lack3, lack4)
    lack_logits = (logit0, logit1, logit2, logit3, logit4)
    present = (present0, present1, present2, present3, present4)
    return ids, first, odds, kind, logit, source, pattern, lacks, lack_logits, present, which

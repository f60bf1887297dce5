"""Drafting and learning on a GPU: what ``host`` does, as Triton kernels on the same rows.

Three kernels per step: ``propose`` (one program per row of the batch), ``count`` (one program) and
``learn`` (one program per node and level of rows). Scores are computed in float32, in ``host`` in
float64; nodes of equal scores come in the same order. Every kernel is an operation of PyTorch, so
that compiled and captured steps can contain it.

Shapes use B rows of a batch, n nodes, k candidates, V tokens in the vocabulary, w slots of a
context, c tokens of a chain and t emitted tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from token_recycling.drafting.kernels import host
from token_recycling.util.launch import launch

LEVELS = tl.constexpr(host.LEVELS)
RUNNERS_UP = tl.constexpr(host.RUNNERS_UP)
SETS, PATTERNS = tl.constexpr(host.SETS), tl.constexpr(host.PATTERNS)
SIBLINGS = tl.constexpr(host.SIBLINGS)
RUNNERS_SHARE, TINY = tl.constexpr(host.RUNNERS_SHARE), tl.constexpr(host.TINY)
INPUTS = tl.constexpr(host.INPUTS)
BINS = tl.constexpr(host.BINS)
LONG = tl.constexpr(host.LONG)
RUN_CLASSES = tl.constexpr(len(host.RUNS))
DEPTH_CLASSES = tl.constexpr(len(host.DEPTHS))
FLOOR = tl.constexpr(host.FLOOR)
WINDOW = tl.constexpr(host.WINDOW)
PRIOR = tl.constexpr(host.PRIOR)
PATTERN_RATE = tl.constexpr(host.PATTERN_RATE)
LOWEST, HIGHEST = tl.constexpr(host.LOWEST), tl.constexpr(host.HIGHEST)
LEAST, MOST = tl.constexpr(host.LEAST), tl.constexpr(host.MOST)
NONE = tl.constexpr(-1e30)  # log probability of no candidate
SCAN = tl.constexpr(1024)  # slots of a context that are compared at once


# Sources of candidates


@triton.jit
def _length_class(run):
    """Return the index in ``host.RUNS``."""
    low = (run >= 1).to(tl.int32) + (run >= 2) + (run >= 3) + (run >= 4)
    return low + (run >= 5) + (run >= 7) + (run >= 10) + (run >= 16)


@triton.jit
def _depth_class(depth):
    """Return the index in ``host.DEPTHS``."""
    return (depth >= 1).to(tl.int32) + (depth >= 2) + (depth >= 4) + (depth >= 8)


@triton.jit
def _find(level: tl.constexpr, before, last, token, V, P, T, candidates, keys, K: tl.constexpr):
    """Return (row, True if it holds candidates) of a token at a level (see ``host.find``)."""
    row = token
    there = token >= 0
    if level == 1:
        key = last * V + token
        slot = key % tl.maximum(P, 1)
        row = V + slot
        there = (last >= 0) & (P > 0)
        there = there & (tl.load(keys + slot, mask=there, other=0) == key)
    if level == 2:
        key = (before * V + last) * V + token
        slot = P + key % tl.maximum(T, 1)
        row = V + slot
        there = (before >= 0) & (last >= 0) & (T > 0)
        there = there & (tl.load(keys + slot, mask=there, other=0) == key)
    best = tl.load(candidates + row * K, mask=there, other=-1)
    return row, there & (best >= 0)


@triton.jit
def _by_level(level, third, second, first, chain):
    """Select a value for every lane by its level; -1 is the chain."""
    return tl.where(
        level == 2, third, tl.where(level == 1, second, tl.where(level == 0, first, chain))
    )


@triton.jit
def _weight(of_set, of_pattern, source):
    """Return the weight of a source: that of the node's set plus that of each lane's pattern."""
    return tl.load(of_set + source).to(tl.float32) + tl.load(of_pattern + source).to(tl.float32)


@triton.jit
def _gather(
    before,
    last,
    token,
    below,
    run,
    depth,
    root_ids,
    root_p,
    rejected,
    at_root,
    V,
    P,
    T,
    candidates,
    probabilities,
    keys,
    weights,
    logits,
    classes,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Unite the candidates of all sources at a node, and mix what these say of each.

    The candidates of a level are ``WIDTH`` lanes, those of triples first; the chain's token is on
    the first lane behind them, and those of the root row follow. This is the order in which
    ``host.gather`` finds them. A candidate of several sources has the same log odds on each of its
    lanes. Sources are numbered as in ``host``: the levels of rows, 3 for the chain, 4 for the root
    row.

    Returns:
        Per lane: candidate (-1: none), first lane of its candidate or not, log odds, feature, log
        odds of the feature, source, and weight set of the candidate's pattern. Then, by source: the
        feature of candidates that it lacks, its log odds, and whether the source is there. Then the
        weight set of the node, and the rows of the pair and the triple.
    """
    lane = tl.arange(0, 4 * WIDTH)
    level = 2 - lane // WIDTH
    rank = lane % WIDTH
    row2, there2 = _find(2, before, last, token, V, P, T, candidates, keys, K)
    row1, there1 = _find(1, before, last, token, V, P, T, candidates, keys, K)
    row0, there0 = _find(0, before, last, token, V, P, T, candidates, keys, K)
    there4 = at_root & (tl.load(root_ids, mask=at_root & (K > 1), other=-1) >= 0)
    row = _by_level(level, row2, row1, row0, 0)
    inside = _by_level(level, there2.to(tl.int32), there1.to(tl.int32), there0.to(tl.int32), 0) != 0
    inside = inside & (rank < K)
    found = tl.load(candidates + row * K + rank, mask=inside, other=-1)
    chained = (level == -1) & (rank == 0) & (below >= 0)
    found = tl.where(chained, below.to(tl.int32), found)
    at_end = (level == -1) & (rank > 0) & (rank < K) & there4
    found = tl.where(at_end, tl.load(root_ids + rank - 1, mask=at_end, other=-1), found)
    valid = found >= 0
    source = tl.where(level >= 0, level, tl.where(rank > 0, 4, 3))
    same = (found[:, None] == found[None, :]) & valid[None, :]
    first = valid & (tl.min(tl.where(same, lane[None, :], 4 * WIDTH), 1) == lane)
    bit = tl.where(valid, tl.full([], 1, tl.int32) << source, 0)
    # The bits of its sources; a damaged row that has a candidate twice must not exceed them.
    pattern = SETS + tl.minimum(tl.sum(tl.where(same, bit[None, :], 0), 1), PATTERNS - 1)
    # Features
    lacking = (LEVELS + 2) * K * BINS
    chain = lacking + (LEVELS + 2) * BINS
    beside = chain + RUN_CLASSES * DEPTH_CLASSES
    nothing = beside + RUN_CLASSES
    root_level = RUNNERS_UP + (tl.load(rejected, mask=at_root, other=0) != 0).to(tl.int32)
    bits = tl.load(probabilities + row * K + rank, mask=inside, other=0)
    bits = tl.where(at_end, tl.load(root_p + rank - 1, mask=at_end, other=0), bits)
    kind = tl.where(at_end, root_level * K + rank - 1, level * K + rank) * BINS
    kind += tl.load(classes + bits, mask=valid & (inside | at_end), other=0)
    length = _length_class(run)
    kind = tl.where(chained, chain + length * DEPTH_CLASSES + _depth_class(depth), kind)
    best2 = tl.load(classes + tl.load(probabilities + row2 * K, mask=there2, other=0))
    best1 = tl.load(classes + tl.load(probabilities + row1 * K, mask=there1, other=0))
    best0 = tl.load(classes + tl.load(probabilities + row0 * K, mask=there0, other=0))
    best4 = tl.load(classes + tl.load(root_p, mask=there4, other=0))
    lack2 = tl.where(there2, lacking + 2 * BINS + best2, nothing)
    lack1 = tl.where(there1, lacking + BINS + best1, nothing)
    lack0 = tl.where(there0, lacking + best0, nothing)
    lack3 = tl.where(below >= 0, beside + length, nothing)
    lack4 = tl.where(there4, lacking + root_level * BINS + best4, nothing)
    logit = tl.load(logits + kind, mask=valid, other=0.0)
    logit2 = tl.load(logits + lack2)
    logit1 = tl.load(logits + lack1)
    logit0 = tl.load(logits + lack0)
    logit3 = tl.load(logits + lack3)
    logit4 = tl.load(logits + lack4)
    # The mixture: as if all sources lacked a candidate, plus what those say that have it.
    state = tl.where(below >= 0, tl.where(run >= LONG, 2, 1), 0)
    which = (there1.to(tl.int32) + 2 * there2.to(tl.int32)) * 3 + state
    of_set = weights + which * INPUTS
    of_pattern = weights + pattern * INPUTS
    weight = _weight(of_set, of_pattern, source)
    beyond = tl.where(at_end, logit4, _by_level(level, logit2, logit1, logit0, logit3))
    more = tl.where(valid, weight * (logit - beyond), 0.0)
    odds = tl.sum(tl.where(same, more[None, :], 0.0), 1)
    odds += _weight(of_set, of_pattern, 0) * logit0
    odds += _weight(of_set, of_pattern, 1) * logit1
    odds += _weight(of_set, of_pattern, 2) * logit2
    odds += _weight(of_set, of_pattern, 3) * logit3
    odds += _weight(of_set, of_pattern, 4) * logit4
    odds += _weight(of_set, of_pattern, 5)
    odds = tl.minimum(tl.maximum(odds, LEAST), MOST)
    source = tl.where(valid, source, -1)
    lacks = (lack0, lack1, lack2, lack3, lack4)
    lack_logits = (logit0, logit1, logit2, logit3, logit4)
    there = (there0, there1, there2, below >= 0, there4)
    return (
        found,
        first,
        odds,
        kind,
        logit,
        source,
        pattern,
        lacks,
        lack_logits,
        there,
        which,
        row1,
        row2,
    )


# Propose


@triton.jit
def _match(tokens, length, root):
    """Find the longest earlier n-gram equal to the last tokens (see ``host.match``).

    Returns:
        The number of tokens that agree, and the slot behind the n-gram.
    """
    best = tl.full([], 0, tl.int64)
    for begin in range(1, length, SCAN):
        end = begin + tl.arange(0, SCAN)
        agrees = end < length
        run = tl.zeros([SCAN], tl.int64)
        own = root
        shift = tl.full([], 0, tl.int64)
        more = shift == 0
        while more:
            here = agrees & (end > shift)
            agrees = here & (tl.load(tokens + end - 1 - shift, mask=here, other=-1) == own)
            run += agrees.to(tl.int64)
            shift += 1
            more = (shift < WINDOW) & (shift < length) & (tl.sum(agrees.to(tl.int32), 0) > 0)
            own = tl.load(tokens + length - 1 - shift, mask=more, other=-1)
        # The longest match, and of equally long ones the last
        best = tl.maximum(best, tl.max(tl.where(run > 0, (run << 32) + end, 0), 0))
    return best >> 32, best & 0xFFFFFFFF


@triton.jit
def at(values, index, wanted):
    """Return the element ``wanted`` of a vector."""
    return tl.sum(tl.where(index == wanted, values, 0), 0)


@triton.jit
def _propose(
    context,
    lengths,
    roots,
    chain,
    counts,
    runs,
    root_ids,
    root_p,
    rejected,
    candidates,
    probabilities,
    keys,
    weights,
    logits,
    classes,
    tokens_out,
    parents_out,
    depths_out,
    ancestors_out,
    valid_out,
    scores_out,
    slots_out,
    keys_out,
    V,
    P,
    T,
    w,
    c,
    longest_chain,
    n,
    max_depth,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
    EXPANDED: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Append the root, search the chain and grow the tree of one row (see ``host.grow``)."""
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    expanded = tl.arange(0, EXPANDED)  # the last node has no children
    lane = tl.arange(0, 4 * WIDTH)
    V, P, T = tl.cast(V, tl.int64), tl.cast(P, tl.int64), tl.cast(T, tl.int64)
    # The context: in a full row, the root replaces the last token.
    text = context + row * w
    root = tl.load(roots + row)
    last = tl.minimum(tl.load(lengths + row), w - 1)
    length = last + 1
    first = tl.load(text + last - 1, mask=last > 0, other=-1)
    second = tl.load(text + last - 2, mask=last > 1, other=-1)
    own_ids, own_p = root_ids + row * (K - 1), root_p + row * (K - 1)
    # The chain
    run, after = _match(text, length, root)
    count = tl.where(run > 0, tl.minimum(length - after, longest_chain), 0)
    link = tl.arange(0, CHAIN)
    slot = after + link
    linked = link < count
    links = tl.load(text + slot, mask=linked & (slot < last), other=0)
    links = tl.where(slot == last, root, links)
    tl.store(chain + row * c + link, links, mask=linked)
    tl.debug_barrier()  # all warps have read the length and the context
    tl.store(text + last, root)
    tl.store(lengths + row, length)
    tl.store(counts + row, tl.where(n > 1, count, -1))
    tl.store(runs + row, run)
    # Nodes, as vectors; pending candidates by node and lane.
    tokens = tl.where(node == 0, root, 0).to(tl.int32)  # few registers
    parents = tl.zeros([NODES], tl.int32)
    depths = tl.zeros([NODES], tl.int32)
    logs = tl.where(node == 0, 0.0, NONE)
    on_chain = tl.where(node == 0, 0, -1)
    pairs = tl.zeros([NODES], tl.int32)
    triples = tl.zeros([NODES], tl.int32)
    pending = tl.full([EXPANDED, 4 * WIDTH], NONE, tl.float32)
    # The node that is expanded, and its attributes
    token = root
    before = second
    previous = first
    log = tl.full([], 0.0, tl.float32)
    depth = tl.full([], 0, tl.int32)
    linked_to = tl.full([], 0, tl.int32)  # chain tokens from the root to it; -1: off the chain
    grows = depth + 1
    for grown in range(1, n):
        cur = grown - 1
        below = at(links, link, linked_to)
        below = tl.where((linked_to >= 0) & (linked_to < count), below, -1)
        _, is_first, odds, _, _, _, _, _, _, _, _, pair_row, triple_row = _gather(
            before,
            previous,
            token,
            below,
            run,
            linked_to,
            own_ids,
            own_p,
            rejected + row,
            cur == 0,
            V,
            P,
            T,
            candidates,
            probabilities,
            keys,
            weights,
            logits,
            classes,
            K,
            WIDTH,
        )
        worth = log - tl.log(1.0 + tl.exp(-odds))
        grows = tl.where(depth < max_depth, grows, 0)
        worth = tl.where(is_first & (grows > 0) & (worth > FLOOR), worth, NONE)
        pending = tl.where(expanded[:, None] == cur, worth[None, :], pending)
        pairs = tl.where(node == cur, pair_row.to(tl.int32), pairs)
        triples = tl.where(node == cur, triple_row.to(tl.int32), triples)
        # The best pending candidate; of equal ones the one that was found first.
        flat = tl.reshape(pending, [EXPANDED * 4 * WIDTH])
        log, index = tl.max(flat, 0, return_indices=True, return_indices_tie_break_left=True)
        above = index // (4 * WIDTH)
        spot = index % (4 * WIDTH)
        grows = tl.where(log > NONE / 2, 1, 0)  # as an integer: Triton's interpreter needs it
        taken = (expanded[:, None] == above) & (lane[None, :] == spot)
        pending = tl.where(taken, NONE, pending)
        level = 2 - spot // WIDTH
        parent_token = at(tokens, node, above).to(tl.int64)
        source = tl.where(level == 2, at(triples, node, above), at(pairs, node, above))
        source = tl.where(level == 0, parent_token, source.to(tl.int64))
        linked_to = at(on_chain, node, above)
        beneath = at(links, link, linked_to)
        candidate = tl.load(
            candidates + source * K + spot % WIDTH, mask=(grows > 0) & (level >= 0), other=-1
        ).to(tl.int64)
        at_end = (level < 0) & (spot % WIDTH > 0)
        of_root = tl.load(own_ids + spot % WIDTH - 1, mask=(grows > 0) & at_end, other=-1)
        token = tl.where(level >= 0, candidate, tl.where(at_end, of_root.to(tl.int64), beneath))
        follows = (linked_to >= 0) & (linked_to < count) & (token == beneath)
        linked_to = tl.where(follows, linked_to + 1, -1)
        depth = at(depths, node, above) + 1
        # The two tokens before the new node
        higher = at(parents, node, above)
        before = tl.where(above == 0, first, at(tokens, node, higher).to(tl.int64))
        previous = parent_token
        new = (node == grown) & (grows > 0)
        tokens = tl.where(new, token.to(tl.int32), tokens)
        parents = tl.where(new, above, parents)
        depths = tl.where(new, depth, depths)
        logs = tl.where(new, log, logs)
        on_chain = tl.where(new, linked_to, on_chain)
    inside = node < n
    valid = logs > NONE / 2
    tokens = tokens.to(tl.int64)
    out = row * n + node
    tl.store(tokens_out + out, tokens, mask=inside)
    tl.store(parents_out + out, parents.to(tl.int64), mask=inside)
    tl.store(depths_out + out, depths.to(tl.int64), mask=inside)
    tl.store(valid_out + out, valid, mask=inside)
    tl.store(scores_out + out, tl.where(valid, tl.exp(logs), 0.0), mask=inside)
    # Rows and keys to learn into
    previous = tl.where(node == 0, first, tl.gather(tokens, parents, 0))
    higher = tl.gather(tl.gather(tokens, parents, 0), parents, 0)
    before = tl.where(node == 0, second, tl.where(parents == 0, first, higher))
    pair = previous * V + tokens
    triple = before * V * V + pair
    has_pair = (previous >= 0) & (P > 0)
    has_triple = (before >= 0) & (previous >= 0) & (T > 0)
    tl.store(slots_out + out * 3, tokens, mask=inside)
    tl.store(
        slots_out + out * 3 + 1, tl.where(has_pair, V + pair % tl.maximum(P, 1), -1), mask=inside
    )
    tl.store(
        slots_out + out * 3 + 2,
        tl.where(has_triple, V + P + triple % tl.maximum(T, 1), -1),
        mask=inside,
    )
    tl.store(keys_out + out * 3, tl.zeros([NODES], tl.int64), mask=inside)
    tl.store(keys_out + out * 3 + 1, pair, mask=inside)
    tl.store(keys_out + out * 3 + 2, triple, mask=inside)
    # Ancestors: first none, then the nodes on each path to the root.
    for i in range(0, n):
        tl.store(ancestors_out + (row * n + i) * n + node, node < 0, mask=inside)
    tl.debug_barrier()
    path = node
    for _ in range(0, max_depth + 1):
        tl.store(ancestors_out + out * n + path, node >= 0, mask=inside)
        path = tl.gather(parents, path, 0)
    tl.store(ancestors_out + out * n, node >= 0, mask=inside)


# Observe


@triton.jit
def _store_evidence(feature, hits, trials, evidence, rates, logits, features, counted):
    """Store the counts of features and the log odds of their rates (see ``refresh_logit``)."""
    tl.store(evidence + feature, hits, mask=counted)
    tl.store(evidence + features + feature, trials, mask=counted)
    expected = tl.load(rates + feature, mask=counted, other=0.5)
    rate = (tl.minimum(hits, trials) + PRIOR * expected) / (trials + PRIOR)
    rate = tl.minimum(tl.maximum(rate, LOWEST), HIGHEST)
    tl.store(logits + feature, tl.log(rate / (1.0 - rate)), mask=counted)


@triton.jit
def _count_lack(lack, there, others, right, evidence, rates, logits, features):
    """Count ``others`` candidates that a source lacks, of which ``right`` are right."""
    counted = there & (others > 0)
    hits = tl.load(evidence + lack, mask=counted, other=0.0) + right
    trials = tl.load(evidence + features + lack, mask=counted, other=0.0) + others
    _store_evidence(lack, hits, trials, evidence, rates, logits, features, counted)


@triton.jit
def _count(
    context,
    lengths,
    chain,
    counts,
    runs,
    root_ids,
    root_p,
    rejected,
    valid,
    emitted,
    candidates,
    probabilities,
    keys,
    weights,
    logits,
    classes,
    evidence,
    rates,
    batch,
    V,
    P,
    T,
    w,
    c,
    n,
    t,
    features,
    learning_rate,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compare candidates along the emitted tokens with these; extend the contexts.

    One program for all rows, in order, so that results do not depend on timing (see
    ``host.count``).
    """
    step = tl.arange(0, STEPS)
    V, P, T = tl.cast(V, tl.int64), tl.cast(P, tl.int64), tl.cast(T, tl.int64)
    for row in range(0, batch):
        text = context + row * w
        length = tl.load(lengths + row)
        active = tl.load(valid + row * n) != 0
        chained = tl.load(counts + row)
        run = tl.load(runs + row)
        found_tokens = tl.load(emitted + row * t + step, mask=step < t, other=-1)
        number = tl.sum((found_tokens >= 0).to(tl.int32), 0)
        steps = tl.where(active & (chained >= 0) & (learning_rate >= 0), number, 0)
        token = tl.load(text + length - 1, mask=length > 0, other=0)
        last = tl.load(text + length - 2, mask=length > 1, other=-1)
        before = tl.load(text + length - 3, mask=length > 2, other=-1)
        on_chain = length >= 0
        for number_before in range(0, steps):
            depth = tl.full([], 0, tl.int32) + number_before
            truth = at(found_tokens, step, depth)
            linked = on_chain & (depth < chained)
            below = tl.load(chain + row * c + depth, mask=linked, other=-1)
            (
                found,
                first,
                odds,
                kind,
                logit,
                source,
                pattern,
                lacks,
                lack_logits,
                there,
                which,
                _,
                _,
            ) = _gather(
                before,
                last,
                token,
                below,
                run,
                depth,
                root_ids + row * (K - 1),
                root_p + row * (K - 1),
                rejected + row,
                number_before == 0,
                V,
                P,
                T,
                candidates,
                probabilities,
                keys,
                weights,
                logits,
                classes,
                K,
                WIDTH,
            )
            present = found >= 0
            right = (found == truth) & present
            error = right.to(tl.float32) - 1.0 / (1.0 + tl.exp(-odds))
            own_error = tl.where(first, error, 0.0)
            all_errors = tl.sum(own_error, 0)
            number_found = tl.sum(first.to(tl.float32), 0)
            is_found = tl.sum((right & first).to(tl.float32), 0)
            of_set = weights + which * INPUTS
            sets = SETS + tl.arange(0, PATTERNS)
            of_sets = weights + sets * INPUTS
            of_pattern = sets[:, None] == pattern[None, :]
            errors = tl.sum(tl.where(of_pattern, own_error[None, :], 0.0), 1)
            tl.debug_barrier()  # everything is read before anything is written
            for index in tl.static_range(5):
                own = source == index
                lack_logit = lack_logits[index]
                slope = tl.where(own, (logit - lack_logit) * error, 0.0)
                gradient = lack_logit * all_errors + tl.sum(slope, 0)
                tl.store(of_set + index, tl.load(of_set + index) + learning_rate * gradient)
                gradients = tl.sum(tl.where(of_pattern, slope[None, :], 0.0), 1)
                gradients += lack_logit * errors
                old = tl.load(of_sets + index)
                tl.store(of_sets + index, old + learning_rate * PATTERN_RATE * gradients)
                has = tl.sum(own.to(tl.float32), 0)
                hit = tl.sum((own & right).to(tl.float32), 0)
                _count_lack(
                    lacks[index],
                    there[index],
                    number_found - has,
                    is_found - hit,
                    evidence,
                    rates,
                    logits,
                    features,
                )
            tl.store(of_set + 5, tl.load(of_set + 5) + learning_rate * all_errors)
            old = tl.load(of_sets + 5)
            tl.store(of_sets + 5, old + learning_rate * PATTERN_RATE * errors)
            hits = tl.load(evidence + kind, mask=present, other=0.0) + right.to(tl.float32)
            trials = tl.load(evidence + features + kind, mask=present, other=0.0) + 1.0
            _store_evidence(kind, hits, trials, evidence, rates, logits, features, present)
            tl.debug_barrier()
            on_chain = linked & (below == truth)
            before = last
            last = token
            token = truth
        # The last emitted token is the next root.
        more = tl.minimum(number - 1, w - length.to(tl.int32))
        tl.store(text + length + step, found_tokens, mask=step < more)
        tl.store(lengths + row, length + tl.maximum(more, 0))


@triton.jit
def _remember(
    ids,
    values,
    parents,
    valid,
    path,
    emitted,
    counts,
    root_ids,
    root_p,
    rejected,
    n,
    p,
    t,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
):
    """Make the root row of one row of the batch (see ``host.remember``).

    ``SIBLINGS`` + 1 groups of ``WIDTH`` lanes: the candidates behind rejected nodes, then the
    runners-up.
    """
    row = tl.program_id(0)
    count = tl.load(counts + row)
    there = count > 0
    last = tl.load(path + row * p + count - 1, mask=there, other=0)
    token = tl.load(emitted + row * t + count - 1, mask=there, other=-1)
    finite = _finite(tl.load(values + (row * n + last) * K).to(tl.float32))
    # Rejected nodes, in order
    node = tl.arange(0, NODES)
    inside = node < n
    best = tl.load(values + (row * n + node) * K, mask=inside, other=float("nan")).to(tl.float32)
    sibling = (tl.load(parents + row * n + node, mask=inside, other=-1) == last) & (node > last)
    sibling = sibling & (tl.load(valid + row * n + node, mask=inside, other=0) != 0)
    sibling = sibling & _finite(best)
    place = tl.cumsum(sibling.to(tl.int32), 0) - 1
    number = tl.minimum(tl.sum(sibling.to(tl.int32), 0), SIBLINGS)
    group = tl.arange(0, SIBLINGS + 1)
    chosen = sibling[None, :] & (place[None, :] == group[:, None]) & (group[:, None] < SIBLINGS)
    source = tl.sum(tl.where(chosen, node[None, :], 0), 1)
    source = tl.where(group == SIBLINGS, last, source.to(tl.int64))
    used = ((group < number) | (group == SIBLINGS)).to(tl.int32)
    used *= tl.where(finite & there, 1, 0)  # as an integer: Triton's interpreter needs it
    # Their candidates
    rank = tl.arange(0, WIDTH)
    at = (row * n + source[:, None]) * K + rank[None, :]
    mask = (used[:, None] != 0) & (rank[None, :] < K)
    found = tl.load(ids + at, mask=mask, other=-1)
    logit = tl.load(values + at, mask=mask, other=-float("inf")).to(tl.float32)
    share = tl.exp(logit - tl.max(tl.where(mask, logit, -1e30), 1)[:, None])
    share = tl.where(mask, share, 0.0)
    share = share / tl.maximum(tl.sum(share, 1), 1e-30)[:, None]
    loses = (group[:, None] < SIBLINGS) | (found != token)
    lost = tl.sum(tl.where(loses, share, 0.0), 1)
    of_runners = tl.where(number > 0, RUNNERS_SHARE, 1.0) / tl.maximum(lost, TINY)
    of_siblings = (1.0 - RUNNERS_SHARE) / tl.maximum(number, 1).to(tl.float32)
    share = share * tl.where(group == SIBLINGS, of_runners, of_siblings)[:, None]
    found = tl.where(loses & mask, found, -1)
    # Their union
    lane = tl.arange(0, (SIBLINGS + 1) * WIDTH)
    found = tl.reshape(found, [(SIBLINGS + 1) * WIDTH])
    share = tl.reshape(share, [(SIBLINGS + 1) * WIDTH])
    valid_lane = found >= 0
    same = (found[:, None] == found[None, :]) & valid_lane[None, :]
    mixed = tl.sum(tl.where(same, share[None, :], 0.0), 1)
    first = valid_lane & (tl.min(tl.where(same, lane[None, :], (SIBLINGS + 1) * WIDTH), 1) == lane)
    better = (mixed[None, :] > mixed[:, None]) | (
        (mixed[None, :] == mixed[:, None]) & (lane[None, :] < lane[:, None])
    )
    place = tl.sum((better & first[None, :]).to(tl.int32), 1)
    own_ids, own_p = root_ids + row * (K - 1), root_p + row * (K - 1)
    empty = tl.full([WIDTH], -1, tl.int32)
    tl.store(own_ids + rank, empty, mask=(rank < K - 1) & there)
    tl.store(own_p + rank, empty.to(tl.int16) + 1, mask=(rank < K - 1) & there)
    tl.debug_barrier()
    kept = first & (place < K - 1)
    tl.store(own_ids + place, found.to(tl.int32), mask=kept)
    tl.store(own_p + place, _to_half(tl.minimum(mixed, 1.0)).to(tl.int16), mask=kept)
    tl.store(rejected + row, (number > 0) & finite, mask=there)


@triton.jit
def _to_half(p):
    """Round half up to float16, as ``host.to_half`` does, and return the bits."""
    small = (p * 16777216.0 + 0.5).to(tl.int32)  # 2^24: a subnormal number or the least normal one
    bits = p.to(tl.int32, bitcast=True)
    # Drop 13 bits of the mantissa; the exponents' biases are 127 and 15.
    normal = ((bits + 0x1000) >> 13) - ((127 - 15) << 10)
    return tl.where(p < 6.103515625e-05, small, normal)


@triton.jit
def _average(old, old_p, new, new_p, old_weight, WIDTH: tl.constexpr, K: tl.constexpr):
    """Average new candidates into a row (see ``host.average``): [WIDTH] each, -1: none."""
    lane = tl.arange(0, 2 * WIDTH)
    from_old = lane < WIDTH
    index = lane % WIDTH
    ids = tl.where(from_old, tl.gather(old, index, 0), tl.gather(new, index, 0))
    share = tl.where(
        from_old,
        old_weight * tl.gather(old_p, index, 0),
        (1.0 - old_weight) * tl.gather(new_p, index, 0),
    )
    valid = ids >= 0
    same = (ids[:, None] == ids[None, :]) & valid[None, :]
    mixed = tl.sum(tl.where(same, share[None, :], 0.0), 1)
    earlier = same & (lane[None, :] < lane[:, None])
    first = valid & (tl.sum(earlier.to(tl.int32), 1) == 0)
    better = (mixed[None, :] > mixed[:, None]) | (
        (mixed[None, :] == mixed[:, None]) & (lane[None, :] < lane[:, None])
    )
    place = tl.sum((better & first[None, :]).to(tl.int32), 1)
    rank = tl.arange(0, WIDTH)
    here = (place[None, :] == rank[:, None]) & first[None, :] & (rank[:, None] < K)
    kept = tl.sum(tl.where(here, ids[None, :] + 1, 0), 1) - 1
    return kept, tl.sum(tl.where(here, mixed[None, :], 0.0), 1)


@triton.jit
def _learn(
    slots,
    slot_keys,
    valid,
    values,
    ids,
    candidates,
    probabilities,
    keys,
    total,
    V,
    old_weight,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Average all nodes of one row into it (see ``host.learn_node``), in order.

    The program of the first of these nodes does it; the others do nothing. So no two programs
    write to the same row.
    """
    own = tl.program_id(0)
    level = tl.program_id(1)
    slot = tl.load(slots + own * 3 + level)
    node = tl.arange(0, BLOCK)
    rank = tl.arange(0, WIDTH)
    wanted = tl.full([], 0, tl.int32)
    if slot >= 0:
        first = tl.full([], 0, tl.int32) + total
        for begin in range(0, own + 1, BLOCK):
            at = begin + node
            same = tl.load(slots + at * 3 + level, mask=at <= own, other=-1) == slot
            best = tl.load(values + at * K, mask=same, other=float("nan"))
            usable = same & (tl.load(valid + at, mask=same, other=0) != 0) & _finite(best)
            first = tl.minimum(first, tl.min(tl.where(usable, at, total), 0))
        wanted = (first == own).to(tl.int32)
    if wanted != 0:
        row = candidates + slot * K
        old = tl.load(row + rank, mask=rank < K, other=-1)
        bits = tl.load(probabilities + slot * K + rank, mask=rank < K, other=0).to(tl.int32)
        old_p = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        key = tl.full([], 0, tl.int64)
        if level > 0:
            key = tl.load(keys + slot - V)
        current = own
        while current < total:
            new = tl.load(ids + current * K + rank, mask=rank < K, other=-1).to(tl.int32)
            logit = tl.load(values + current * K + rank, mask=rank < K, other=-float("inf"))
            logit = logit.to(tl.float32)
            p = tl.exp(logit - tl.max(logit, 0))
            p = p / tl.sum(p, 0)
            new_key = tl.load(slot_keys + current * 3 + level)
            known = (tl.max(old, 0) >= 0) & ((level == 0) | (key == new_key)) & (old_weight > 0)
            mixed, mixed_p = _average(old, old_p, new, p, old_weight, WIDTH, K)
            old = tl.where(known, mixed, new)
            bits = _to_half(tl.where(known, mixed_p, p))
            old_p = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            key = new_key
            # The next node of the same row
            following = tl.full([], 0, tl.int32) + total
            for begin in range(current + 1, total, BLOCK):
                at = begin + node
                same = tl.load(slots + at * 3 + level, mask=at < total, other=-1) == slot
                best = tl.load(values + at * K, mask=same, other=float("nan"))
                usable = same & (tl.load(valid + at, mask=same, other=0) != 0) & _finite(best)
                following = tl.minimum(following, tl.min(tl.where(usable, at, total), 0))
            current = following
        tl.store(row + rank, old, mask=rank < K)
        tl.store(probabilities + slot * K + rank, bits.to(tl.int16), mask=rank < K)
        if level > 0:
            tl.store(keys + slot - V, key)


@triton.jit
def _finite(value):
    """Return True where a value is neither NaN nor infinite."""
    return tl.abs(value) < float("inf")


# Operations


@torch.library.custom_op(
    "token_recycling::device_propose",
    mutates_args=("context", "lengths", "chain", "counts", "runs", "slots", "slot_keys"),
)
def _launch_propose(
    context: Tensor,
    lengths: Tensor,
    roots: Tensor,
    chain: Tensor,
    counts: Tensor,
    runs: Tensor,
    root_ids: Tensor,
    root_p: Tensor,
    rejected: Tensor,
    slots: Tensor,
    slot_keys: Tensor,
    candidates: Tensor,
    probabilities: Tensor,
    keys: Tensor,
    weights: Tensor,
    logits: Tensor,
    classes: Tensor,
    vocab_size: int,
    pairs: int,
    triples: int,
    longest_chain: int,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, n = slots.shape[:2]
    tokens, parents, depths = (roots.new_empty((batch, n)) for _ in range(3))
    ancestors = roots.new_empty((batch, n, n), dtype=torch.bool)
    valid = roots.new_empty((batch, n), dtype=torch.bool)
    scores = roots.new_empty((batch, n), dtype=torch.float32)
    width, nodes = _width(candidates), triton.next_power_of_2(n)
    launch(
        _propose,
        (batch,),
        context,
        lengths,
        roots,
        chain,
        counts,
        runs,
        root_ids,
        root_p,
        rejected,
        candidates,
        probabilities,
        keys,
        weights,
        logits,
        classes,
        tokens,
        parents,
        depths,
        ancestors,
        valid,
        scores,
        slots,
        slot_keys,
        vocab_size,
        pairs,
        triples,
        context.shape[1],
        chain.shape[1],
        longest_chain,
        n,
        max_depth,
        K=candidates.shape[1],
        WIDTH=width,
        NODES=nodes,
        EXPANDED=triton.next_power_of_2(max(n - 1, 1)),
        CHAIN=triton.next_power_of_2(max(chain.shape[1], 1)),
        num_warps=warps(n, width),
        **REGISTERS,
    )
    return tokens, parents, depths, ancestors, valid, scores


@_launch_propose.register_fake
def _(context: Tensor, lengths: Tensor, roots: Tensor, *args: Any) -> Any:
    batch, n = args[6].shape[:2]
    tokens, parents, depths = (roots.new_empty((batch, n)) for _ in range(3))
    ancestors = roots.new_empty((batch, n, n), dtype=torch.bool)
    valid = roots.new_empty((batch, n), dtype=torch.bool)
    return tokens, parents, depths, ancestors, valid, valid.new_empty((batch, n), dtype=torch.float)


@torch.library.custom_op(
    "token_recycling::device_count",
    mutates_args=("context", "lengths", "weights", "logits", "evidence"),
)
def _launch_count(
    context: Tensor,
    lengths: Tensor,
    chain: Tensor,
    counts: Tensor,
    runs: Tensor,
    root_ids: Tensor,
    root_p: Tensor,
    rejected: Tensor,
    valid: Tensor,
    emitted: Tensor,
    candidates: Tensor,
    probabilities: Tensor,
    keys: Tensor,
    weights: Tensor,
    logits: Tensor,
    classes: Tensor,
    evidence: Tensor,
    rates: Tensor,
    vocab_size: int,
    pairs: int,
    triples: int,
    learning_rate: float,
) -> None:
    launch(
        _count,
        (1,),
        context,
        lengths,
        chain,
        counts,
        runs,
        root_ids,
        root_p,
        rejected,
        valid,
        emitted,
        candidates,
        probabilities,
        keys,
        weights,
        logits,
        classes,
        evidence,
        rates,
        len(lengths),
        vocab_size,
        pairs,
        triples,
        context.shape[1],
        chain.shape[1],
        valid.shape[1],
        emitted.shape[1],
        evidence.shape[1],
        learning_rate,
        K=candidates.shape[1],
        WIDTH=_width(candidates),
        STEPS=triton.next_power_of_2(emitted.shape[1]),
        num_warps=COUNT_WARPS,
        **REGISTERS,
    )


@torch.library.custom_op(
    "token_recycling::device_learn", mutates_args=("candidates", "probabilities", "keys")
)
def _launch_learn(
    slots: Tensor,
    slot_keys: Tensor,
    valid: Tensor,
    values: Tensor,
    ids: Tensor,
    candidates: Tensor,
    probabilities: Tensor,
    keys: Tensor,
    vocab_size: int,
    old_weight: float,
) -> None:
    total = valid.numel()
    launch(
        _learn,
        (total, host.LEVELS),
        slots,
        slot_keys,
        valid,
        values,
        ids,
        candidates,
        probabilities,
        keys,
        total,
        vocab_size,
        old_weight,
        K=candidates.shape[1],
        WIDTH=_width(candidates),
        BLOCK=min(triton.next_power_of_2(total), MOST_AT_ONCE),
        num_warps=LEARN_WARPS,
    )


@torch.library.custom_op(
    "token_recycling::device_remember", mutates_args=("root_ids", "root_p", "rejected")
)
def _launch_remember(
    ids: Tensor,
    values: Tensor,
    parents: Tensor,
    valid: Tensor,
    path: Tensor,
    emitted: Tensor,
    counts: Tensor,
    root_ids: Tensor,
    root_p: Tensor,
    rejected: Tensor,
) -> None:
    batch, n, k = ids.shape
    launch(
        _remember,
        (batch,),
        ids,
        values,
        parents,
        valid,
        path,
        emitted,
        counts,
        root_ids,
        root_p,
        rejected,
        n,
        path.stride(0),
        emitted.stride(0),
        K=k,
        WIDTH=triton.next_power_of_2(k),
        NODES=triton.next_power_of_2(n),
        num_warps=REMEMBER_WARPS,
        **REGISTERS,
    )


@_launch_count.register_fake
@_launch_learn.register_fake
@_launch_remember.register_fake
def _(*args: Any) -> None:
    return None


COUNT_WARPS, REMEMBER_WARPS, LEARN_WARPS = 4, 8, 1
# Few programs run, so that none has to leave registers to others: without this, NVIDIA's assembler
# keeps a few values in memory to use fewer registers.
REGISTERS: dict[str, Any] = {} if torch.version.hip else {"maxnreg": 248}
MOST_AT_ONCE = 256  # nodes whose rows are compared at once


def warps(n: int, width: int) -> int:
    """Return the warps of ``_propose``, for about 16 pending candidates per thread."""
    expanded = triton.next_power_of_2(max(n - 1, 1))
    return int(min(max(expanded * 4 * width // (32 * 16), 4), 8))


def _width(candidates: Tensor) -> int:
    """Return the lanes of a row with k candidates."""
    return int(triton.next_power_of_2(candidates.shape[1]))

"""Averaging entries, and making root rows, as ``host.entries`` and ``host.learn`` do."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from skinny_kernels.gpu.launch import REGISTERS, launch
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.kernels.device.sources import LEVELS
from token_recycling.drafting.kernels.device.state import DeviceDraft, DeviceTables
from token_recycling.drafting.kernels.device.vector import LEAST_NODES, LEAST_STEPS, lanes
from token_recycling.drafting.kernels.host import entries
from token_recycling.drafting.kernels.host import learn as host_learn
from token_recycling.drafting.kernels.host.state import State

SIBLINGS = tl.constexpr(host_learn.SIBLINGS)
RUNNERS_SHARE, TINY = tl.constexpr(host_learn.RUNNERS_SHARE), tl.constexpr(entries.TINY)
REMEMBER_WARPS, LEARN_WARPS = 8, 1
AT_ONCE = 256  # nodes whose rows are compared at once


@triton.jit
def _finite(value):
    """Return True where a value is neither NaN nor infinite."""
    return tl.abs(value) < float("inf")


@triton.jit
def _to_half(p):
    """Round half up to float16, as ``host.entries.to_half`` does, and return the bits."""
    small = (p * 16777216.0 + 0.5).to(tl.int32)  # 2^24: a subnormal number or the least normal one
    bits = p.to(tl.int32, bitcast=True)
    # Drop 13 bits of the mantissa; the exponents' biases are 127 and 15.
    normal = ((bits + 0x1000) >> 13) - ((127 - 15) << 10)
    return tl.where(p < 6.103515625e-05, small, normal)


@triton.jit
def _united(ids, share, LANES: tl.constexpr):
    """Return the shares of candidates that several of ``LANES`` lanes have, added up on each lane.

    Then whether a lane is the first of its candidate, and the place of its share among these; of
    equal shares the first lane comes first. Negative candidates are none.
    """
    lane = tl.arange(0, LANES)
    valid = ids >= 0
    same = (ids[:, None] == ids[None, :]) & valid[None, :]
    mixed = tl.sum(tl.where(same, share[None, :], 0.0), 1)
    first = valid & (tl.min(tl.where(same, lane[None, :], LANES), 1) == lane)
    better = (mixed[None, :] > mixed[:, None]) | (
        (mixed[None, :] == mixed[:, None]) & (lane[None, :] < lane[:, None])
    )
    return mixed, first, tl.sum((better & first[None, :]).to(tl.int32), 1)


# Entries


@triton.jit
def _average(old, old_p, new, new_p, old_weight, WIDTH: tl.constexpr, K: tl.constexpr):
    """Average new candidates into a row (see ``host.entries.average``): [WIDTH] each, -1: none."""
    lane = tl.arange(0, 2 * WIDTH)
    from_old = lane < WIDTH
    index = lane % WIDTH
    ids = tl.where(from_old, tl.gather(old, index, 0), tl.gather(new, index, 0))
    share = tl.where(
        from_old,
        old_weight * tl.gather(old_p, index, 0),
        (1.0 - old_weight) * tl.gather(new_p, index, 0),
    )
    mixed, first, place = _united(ids, share, 2 * WIDTH)
    rank = tl.arange(0, WIDTH)
    here = (place[None, :] == rank[:, None]) & first[None, :] & (rank[:, None] < K)
    best_ids = tl.sum(tl.where(here, ids[None, :] + 1, 0), 1) - 1
    return best_ids, tl.sum(tl.where(here, mixed[None, :], 0.0), 1)


@triton.jit
def _first_after(
    begin, end, entry, states, starts, draft, valid, values, n, level, K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the first node from ``begin`` on that teaches an entry; ``end``: none before it."""
    found = tl.full([], 0, tl.int32) + end
    for block in range(begin, end, BLOCK):
        at = block + tl.arange(0, BLOCK)
        usable = at < end
        usable = usable & (tl.load(valid + at, mask=usable, other=0) != 0)
        row, node = at // n, at % n
        own = tl.load(states + row, mask=usable, other=0)
        place = (own * n + node) * LEVELS + level
        usable = usable & (tl.load(draft.entries + place, mask=usable, other=-1) == entry)
        first = tl.load(starts + row, mask=usable, other=0)
        best = tl.load(values + (first + node) * K, mask=usable, other=float("nan"))
        usable = usable & _finite(best.to(tl.float32))
        found = tl.minimum(found, tl.min(tl.where(usable, at, end), 0))
    return found


@triton.jit(do_not_specialize=["total", "n", "V"])
def _learn(
    states,
    starts,
    draft,
    valid,
    values,
    ids,
    tables,
    total,
    n,
    V,
    old_weight,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Average all nodes of one entry into it (see ``host.entries.learn_node``), in order.

    The program of the first of these nodes does it; the others do nothing. So no two programs
    write to the same entry.
    """
    this_node = tl.program_id(0)
    level = tl.program_id(1)
    rank = tl.arange(0, WIDTH)
    is_first = tl.full([], 0, tl.int32)
    entry = tl.full([], -1, tl.int64)
    if tl.load(valid + this_node) != 0:
        own = tl.load(states + this_node // n)
        entry = tl.load(draft.entries + (own * n + this_node % n) * LEVELS + level)
    if entry >= 0:
        first = _first_after(
            0, this_node + 1, entry, states, starts, draft, valid, values, n, level, K, BLOCK
        )
        is_first = (first == this_node).to(tl.int32)
    if is_first != 0:
        row, row_p = tables.candidates + entry * K + rank, tables.probabilities + entry * K + rank
        old = tl.load(row, mask=rank < K, other=-1)
        bits = tl.load(row_p, mask=rank < K, other=0).to(tl.int32)
        old_p = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        key = tl.full([], 0, tl.int64)
        if level > 0:
            key = tl.load(tables.keys + entry - V)
        current = this_node
        while current < total:
            node = current % n
            place = (tl.load(starts + current // n) + node) * K + rank
            new = tl.load(ids + place, mask=rank < K, other=-1).to(tl.int32)
            logit = tl.load(values + place, mask=rank < K, other=-float("inf"))
            logit = logit.to(tl.float32)
            p = tl.exp(logit - tl.max(logit, 0))
            p = p / tl.sum(p, 0)
            own = tl.load(states + current // n)
            new_key = tl.load(draft.keys + (own * n + node) * LEVELS + level)
            known = (tl.max(old, 0) >= 0) & ((level == 0) | (key == new_key)) & (old_weight > 0)
            mixed, mixed_p = _average(old, old_p, new, p, old_weight, WIDTH, K)
            old = tl.where(known, mixed, new)
            bits = _to_half(tl.where(known, mixed_p, p))
            old_p = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            key = new_key
            # The next node of the same entry
            current = _first_after(
                current + 1, total, entry, states, starts, draft, valid, values, n, level, K, BLOCK
            )
        tl.store(row, old, mask=rank < K)
        tl.store(row_p, bits.to(tl.int16), mask=rank < K)
        if level > 0:
            tl.store(tables.keys + entry - V, key)


def learn(
    states: Tensor,
    starts: Tensor,
    draft: DeviceDraft,
    valid: Tensor,
    values: Tensor,
    ids: Tensor,
    old_weight: float,
    tables: DeviceTables,
    vocab_size: int,
) -> None:
    """Mix the candidates behind verified nodes into the tables.

    Args:
        states: int64 [B], of the rows of the batch.
        starts: int64 [B], index of each row's root in values and ids.
        draft: whose nodes were verified.
        valid: bool [B, n], nodes that were verified.
        values: [m, k], the best logits behind each node.
        ids: int64 [m, k], their tokens.
        old_weight: of the candidates that were there.
        tables: candidates, probabilities and keys are changed.
        vocab_size: V.
    """
    total, k = valid.numel(), ids.shape[-1]
    launch(
        _learn,
        (total, LEVELS.value),
        *(states, starts, draft, valid, values, ids, tables),
        *(total, valid.shape[1], vocab_size, old_weight),
        K=k,
        WIDTH=triton.next_power_of_2(k),
        BLOCK=AT_ONCE,
        num_warps=LEARN_WARPS,
        **REGISTERS,
    )


# Root rows


@triton.jit(do_not_specialize=["w", "n", "p", "t"])
def _remember(
    states,
    starts,
    state,
    parents,
    valid,
    values,
    ids,
    path,
    emitted,
    counts,
    w,
    n,
    p,
    t,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Make the root row of one row of the batch (see ``host.learn.remember``), and extend its text.

    ``SIBLINGS`` + 1 groups of ``WIDTH`` lanes: the candidates behind rejected nodes, then the
    runners-up.
    """
    row = tl.program_id(0)
    own = tl.load(states + row)
    start = tl.load(starts + row)
    count = tl.load(counts + row)
    active = count > 0
    # The text; the last emitted token is the next root.
    step = tl.arange(0, STEPS)
    length = tl.load(state.lengths + own)
    more = tl.minimum(count - 1, w - length)
    new = tl.load(emitted + row * t + step, mask=step < more, other=-1)
    tl.store(state.context + own * w + length + step, new, mask=step < more)
    tl.debug_barrier()  # all warps have read the length
    tl.store(state.lengths + own, length + tl.maximum(more, 0))
    # The root row
    along = tl.load(path + row * p + step, mask=step < count, other=-1)
    known = tl.sum((along >= 0).to(tl.int32), 0)
    last = tl.load(path + row * p + known - 1, mask=active, other=0)
    token = tl.load(emitted + row * t + known - 1, mask=active, other=-1)
    best = tl.load(values + (start + last) * K, mask=active, other=float("nan"))
    finite = _finite(best.to(tl.float32))
    # Rejected nodes, in order
    node = tl.arange(0, NODES)
    inside = node < n
    inside = inside & (tl.load(valid + row * n + node, mask=inside, other=0) != 0)
    best = tl.load(values + (start + node) * K, mask=inside, other=float("nan")).to(tl.float32)
    sibling = (tl.load(parents + own * n + node, mask=inside, other=-1) == last) & (node > last)
    sibling = sibling & _finite(best)
    place = tl.cumsum(sibling.to(tl.int32), 0) - 1
    number = tl.minimum(tl.sum(sibling.to(tl.int32), 0), SIBLINGS)
    group = tl.arange(0, SIBLINGS + 1)
    chosen = sibling[None, :] & (place[None, :] == group[:, None]) & (group[:, None] < SIBLINGS)
    source = tl.sum(tl.where(chosen, node[None, :], 0), 1)
    source = tl.where(group == SIBLINGS, last, source.to(tl.int64))
    used = ((group < number) | (group == SIBLINGS)).to(tl.int32)
    used *= tl.where(finite & active, 1, 0)  # as an integer: Triton's interpreter needs it
    # Their candidates
    rank = tl.arange(0, WIDTH)
    at = (start + source[:, None]) * K + rank[None, :]
    mask = (used[:, None] != 0) & (rank[None, :] < K)
    tokens = tl.load(ids + at, mask=mask, other=-1)
    logit = tl.load(values + at, mask=mask, other=-float("inf")).to(tl.float32)
    share = tl.exp(logit - tl.max(tl.where(mask, logit, -1e30), 1)[:, None])
    share = tl.where(mask, share, 0.0)
    share = share / tl.maximum(tl.sum(share, 1), 1e-30)[:, None]
    loses = (group[:, None] < SIBLINGS) | (tokens != token)
    lost = tl.sum(tl.where(loses, share, 0.0), 1)
    of_runners = tl.where(number > 0, RUNNERS_SHARE, 1.0) / tl.maximum(lost, TINY)
    of_siblings = (1.0 - RUNNERS_SHARE) / tl.maximum(number, 1).to(tl.float32)
    share = share * tl.where(group == SIBLINGS, of_runners, of_siblings)[:, None]
    tokens = tl.where(loses & mask, tokens, -1)
    # Their union
    lanes: tl.constexpr = (SIBLINGS + 1) * WIDTH
    tokens, share = tl.reshape(tokens, [lanes]), tl.reshape(share, [lanes])
    mixed, first, place = _united(tokens, share, lanes)
    own_ids = state.roots.candidates + own * (K - 1)
    own_p = state.roots.probabilities + own * (K - 1)
    empty = tl.full([WIDTH], -1, tl.int32)
    tl.store(own_ids + rank, empty, mask=(rank < K - 1) & active)
    tl.store(own_p + rank, empty.to(tl.int16) + 1, mask=(rank < K - 1) & active)
    tl.debug_barrier()
    in_row = first & (place < K - 1)
    tl.store(own_ids + place, tokens.to(tl.int32), mask=in_row)
    tl.store(own_p + place, _to_half(tl.minimum(mixed, 1.0)).to(tl.int16), mask=in_row)
    tl.store(state.roots.rejected + own, (number > 0) & finite, mask=active)


def remember(
    states: Tensor,
    starts: Tensor,
    state: State,
    parents: Tensor,
    valid: Tensor,
    values: Tensor,
    ids: Tensor,
    accepted: Accepted,
) -> None:
    """Find candidates for the next roots: runners-up, and what follows rejected nodes.

    Args:
        states: int64 [B], of the rows of the batch.
        starts: int64 [B], index of each row's root in values and ids.
        state: texts get the emitted tokens, but for the last one, which is the next root; and the
            candidates for this are changed.
        parents: int64 [S, n], of the nodes of each state.
        valid: bool [B, n], nodes that were verified.
        values: [m, k], the best logits behind each node.
        ids: int64 [m, k], their tokens.
        accepted: the accepted paths; a node of -1 is not of the draft.
    """
    n, k = valid.shape[1], ids.shape[-1]
    path, emitted = accepted.path, accepted.emitted
    launch(
        _remember,
        (len(states),),
        *(states, starts, state, parents, valid, values, ids, path, emitted, accepted.counts),
        *(state.context.shape[1], n, path.stride(0), emitted.stride(0)),
        K=k,
        WIDTH=triton.next_power_of_2(k),
        NODES=lanes(n, LEAST_NODES),
        STEPS=lanes(emitted.shape[1], LEAST_STEPS),
        num_warps=REMEMBER_WARPS,
        **REGISTERS,
    )

"""Averaging rows, and making root rows (see ``host.learn_node`` and ``host.remember``)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.device.sources import lanes_per_row
from token_recycling.drafting.kernels.device.state import DeviceTables, RootCandidates
from token_recycling.drafting.kernels.host import entries, state
from token_recycling.drafting.kernels.host import learn as host_learn
from token_recycling.util.launch import REGISTERS, launch
from token_recycling.util.vector import LEAST_NODES, lanes

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
    """Round half up to float16, as ``host.to_half`` does, and return the bits."""
    small = (p * 16777216.0 + 0.5).to(tl.int32)  # 2^24: a subnormal number or the least normal one
    bits = p.to(tl.int32, bitcast=True)
    # Drop 13 bits of the mantissa; the exponents' biases are 127 and 15.
    normal = ((bits + 0x1000) >> 13) - ((127 - 15) << 10)
    return tl.where(p < 6.103515625e-05, small, normal)


# Rows


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
    best_ids = tl.sum(tl.where(here, ids[None, :] + 1, 0), 1) - 1
    return best_ids, tl.sum(tl.where(here, mixed[None, :], 0.0), 1)


@triton.jit(do_not_specialize=["total", "V"])
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
    this_node = tl.program_id(0)
    level = tl.program_id(1)
    slot = tl.load(slots + this_node * 3 + level)
    node = tl.arange(0, BLOCK)
    rank = tl.arange(0, WIDTH)
    is_first = tl.full([], 0, tl.int32)
    if slot >= 0:
        first = tl.full([], 0, tl.int32) + total
        for begin in range(0, this_node + 1, BLOCK):
            at = begin + node
            same = tl.load(slots + at * 3 + level, mask=at <= this_node, other=-1) == slot
            best = tl.load(values + at * K, mask=same, other=float("nan"))
            usable = same & (tl.load(valid + at, mask=same, other=0) != 0) & _finite(best)
            first = tl.minimum(first, tl.min(tl.where(usable, at, total), 0))
        is_first = (first == this_node).to(tl.int32)
    if is_first != 0:
        row = candidates + slot * K
        old = tl.load(row + rank, mask=rank < K, other=-1)
        bits = tl.load(probabilities + slot * K + rank, mask=rank < K, other=0).to(tl.int32)
        old_p = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        key = tl.full([], 0, tl.int64)
        if level > 0:
            key = tl.load(keys + slot - V)
        current = this_node
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


def learn(
    tables: DeviceTables,
    slots: Tensor,
    slot_keys: Tensor,
    valid: Tensor,
    values: Tensor,
    ids: Tensor,
    old_weight: float,
) -> None:
    """Mix the candidates behind verified nodes into the tables.

    Args:
        tables: candidates, probabilities and keys are changed.
        slots: see ``propose.propose``.
        slot_keys: likewise.
        valid: bool [B, n], nodes that were verified.
        values: [B, n, k], the best logits behind each node.
        ids: int64 [B, n, k], their tokens.
        old_weight: of the probabilities that were there.
    """
    total = valid.numel()
    launch(
        _learn,
        (total, state.LEVELS),
        slots,
        slot_keys,
        valid,
        values,
        ids,
        *tables[:3],
        total,
        tables.vocab_size,
        old_weight,
        K=tables.k,
        WIDTH=lanes_per_row(tables.candidates),
        BLOCK=AT_ONCE,
        num_warps=LEARN_WARPS,
        **REGISTERS,
    )


# Root rows


@triton.jit(do_not_specialize=["n", "p", "t"])
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
    active = count > 0
    last = tl.load(path + row * p + count - 1, mask=active, other=0)
    token = tl.load(emitted + row * t + count - 1, mask=active, other=-1)
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
    used *= tl.where(finite & active, 1, 0)  # as an integer: Triton's interpreter needs it
    # Their candidates
    rank = tl.arange(0, WIDTH)
    at = (row * n + source[:, None]) * K + rank[None, :]
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
    lane = tl.arange(0, (SIBLINGS + 1) * WIDTH)
    tokens = tl.reshape(tokens, [(SIBLINGS + 1) * WIDTH])
    share = tl.reshape(share, [(SIBLINGS + 1) * WIDTH])
    valid_lane = tokens >= 0
    same = (tokens[:, None] == tokens[None, :]) & valid_lane[None, :]
    mixed = tl.sum(tl.where(same, share[None, :], 0.0), 1)
    first = valid_lane & (tl.min(tl.where(same, lane[None, :], (SIBLINGS + 1) * WIDTH), 1) == lane)
    better = (mixed[None, :] > mixed[:, None]) | (
        (mixed[None, :] == mixed[:, None]) & (lane[None, :] < lane[:, None])
    )
    place = tl.sum((better & first[None, :]).to(tl.int32), 1)
    own_ids, own_p = root_ids + row * (K - 1), root_p + row * (K - 1)
    empty = tl.full([WIDTH], -1, tl.int32)
    tl.store(own_ids + rank, empty, mask=(rank < K - 1) & active)
    tl.store(own_p + rank, empty.to(tl.int16) + 1, mask=(rank < K - 1) & active)
    tl.debug_barrier()
    in_row = first & (place < K - 1)
    tl.store(own_ids + place, tokens.to(tl.int32), mask=in_row)
    tl.store(own_p + place, _to_half(tl.minimum(mixed, 1.0)).to(tl.int16), mask=in_row)
    tl.store(rejected + row, (number > 0) & finite, mask=active)


def remember(
    own: RootCandidates, draft: DraftTree, values: Tensor, ids: Tensor, accepted: Accepted
) -> None:
    """Find candidates for the next roots: runners-up, and what follows rejected nodes.

    Args:
        own: changed.
        draft: what was verified.
        values: [B, n, k], the best logits behind each node.
        ids: int64 [B, n, k], their tokens.
        accepted: the accepted paths.
    """
    batch, n, k = ids.shape
    path, emitted = accepted.path, accepted.emitted
    launch(
        _remember,
        (batch,),
        ids,
        values,
        draft.parents.contiguous(),  # a draft that came from the host is a part of a tensor
        draft.valid.contiguous(),
        path,
        emitted,
        accepted.counts,
        *own,
        n,
        path.stride(0),
        emitted.stride(0),
        K=k,
        WIDTH=triton.next_power_of_2(k),
        NODES=lanes(n, LEAST_NODES),
        num_warps=REMEMBER_WARPS,
        **REGISTERS,
    )

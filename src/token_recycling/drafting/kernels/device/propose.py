"""Growing trees, several nodes at a time (see ``host.tree.propose``)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from skinny_kernels.gpu.launch import REGISTERS, launch
from token_recycling.drafting.kernels.device.context import begin_draft
from token_recycling.drafting.kernels.device.sources import LEVELS, gather, locate
from token_recycling.drafting.kernels.device.state import DeviceDraft, DeviceTables
from token_recycling.drafting.kernels.device.vector import LEAST_NODES, lanes
from token_recycling.drafting.kernels.host import tree
from token_recycling.drafting.kernels.host.rates import feature_offsets
from token_recycling.drafting.kernels.host.state import State

FLOOR = tl.constexpr(tree.FLOOR)
NONE = tl.constexpr(-1e30)  # log probability of no candidate
PLACES = tl.constexpr(1 << 14)  # most candidates that are compared in a round
ORDERS = tl.constexpr(1 << 18)  # most parents times lanes
PROPOSE_WARPS = 8


@triton.jit
def _keys(logs, parents, lanes, places, NODES: tl.constexpr, WIDTH: tl.constexpr):
    """Return int64 numbers in the order of candidates, the best one the greatest; 0: none.

    By log probability; of equal ones by parent, then by lane. ``places`` are carried along.
    """
    tl.static_assert(NODES * 4 * WIDTH <= ORDERS, "k is too large for drafts on a GPU")
    distance = (-logs).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # bits of floats >= 0 are in order
    order = (NODES - 1 - parents) * (4 * WIDTH) + 4 * WIDTH - 1 - lanes
    key = (0x7FFFFFFF - distance).to(tl.int64) << 32
    key += order.to(tl.int64) * PLACES + places
    return tl.where(logs > NONE / 2, key, 0)


@triton.jit
def _link_below(links, on_chain, count, CHAIN: tl.constexpr):
    """Return the chain's token below nodes with ``on_chain`` of its tokens above; -1: none."""
    below = tl.gather(links, tl.minimum(tl.maximum(on_chain, 0), CHAIN - 1), 0)
    return tl.where((on_chain >= 0) & (on_chain < count), below, -1)


@triton.jit
def _write(own, tokens, parents, depths, logs, second, first, draft, sizes, n, NODES: tl.constexpr):
    """Write a draft, and the rows and keys to learn into (see ``host.entries.locate``)."""
    node = tl.arange(0, NODES)
    inside = node < n
    valid = logs > NONE / 2
    tokens = tokens.to(tl.int64)
    out = own * n + node
    tl.store(draft.tokens + out, tokens, mask=inside)
    tl.store(draft.parents + out, parents.to(tl.int64), mask=inside)
    tl.store(draft.depths + out, depths.to(tl.int64), mask=inside)
    tl.store(draft.valid + out, valid, mask=inside)
    tl.store(draft.scores + out, tl.where(valid, tl.exp(logs), 0.0), mask=inside)
    # Rows and keys to learn into
    previous = tl.where(node == 0, first, tl.gather(tokens, parents, 0))
    higher = tl.gather(tl.gather(tokens, parents, 0), parents, 0)
    before = tl.where(node == 0, second, tl.where(parents == 0, first, higher))
    pair_entry, pair, has_pair = locate(1, before, previous, tokens, sizes)
    triple_entry, triple, has_triple = locate(2, before, previous, tokens, sizes)
    tl.store(draft.entries + out * LEVELS, tokens, mask=inside)
    tl.store(draft.entries + out * LEVELS + 1, tl.where(has_pair, pair_entry, -1), mask=inside)
    tl.store(draft.entries + out * LEVELS + 2, tl.where(has_triple, triple_entry, -1), mask=inside)
    tl.store(draft.keys + out * LEVELS, tl.zeros([NODES], tl.int64), mask=inside)
    tl.store(draft.keys + out * LEVELS + 1, pair, mask=inside)
    tl.store(draft.keys + out * LEVELS + 2, triple, mask=inside)
    # Ancestors: first none, then the nodes on each path to the root.
    for i in range(0, n):
        tl.store(draft.ancestors + (own * n + i) * n + node, node < 0, mask=inside)
    tl.debug_barrier()
    path = node
    for _ in range(0, tl.max(depths, 0) + 1):
        tl.store(draft.ancestors + out * n + path, node >= 0, mask=inside)
        path = tl.gather(parents, path, 0)
    tl.store(draft.ancestors + out * n, node >= 0, mask=inside)


# All numbers of nodes up to ``LEAST_NODES`` share one kernel.
@triton.jit(
    do_not_specialize=["V", "P", "T", "w", "reach", "c", "longest_chain", "n", "max_depth"],
)
def _propose(
    states,
    state,
    roots,
    tables,
    draft,
    V,
    P,
    T,
    w,
    reach,
    c,
    longest_chain,
    n,
    max_depth,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
    ROUND: tl.constexpr,
    CHAIN: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Append the root, search the chain and grow the tree of one row (see ``host.tree.propose``).

    ``host.tree.grow`` expands one node after another. Here, each round expands the ``ROUND`` best
    nodes that have not been, and keeps the best of old and new ones. No child is better than its
    parent: so the tree is the same once no node but the last is left to expand.
    """
    own = tl.load(states + tl.program_id(0))
    node = tl.arange(0, NODES)
    turn = tl.arange(0, ROUND)
    tile: tl.constexpr = ROUND * 4 * WIDTH
    sizes = (tl.cast(V, tl.int64), tl.cast(P, tl.int64), tl.cast(T, tl.int64))
    root, second, first, run, count, links = begin_draft(
        own, state, roots, w, reach, c, longest_chain, n, CHAIN
    )
    # The best nodes so far, best first
    tokens = tl.where(node == 0, root, 0).to(tl.int32)  # few registers
    parents = tl.zeros([NODES], tl.int32)
    lanes = tl.zeros([NODES], tl.int32)
    depths = tl.zeros([NODES], tl.int32)
    logs = tl.where(node == 0, 0.0, NONE)
    on_chain = tl.where(node == 0, 0, -1)  # chain tokens from the root to it; -1: off the chain
    closed = tl.where(node == 0, 0, 1)  # 1: has been expanded, or cannot be
    rounds_left = n - 1  # most rounds: the best node that waits is in the tree for good
    while rounds_left > 0:
        # The nodes to expand; fewer than ROUND of them leave rows of the tile empty.
        waits = (closed == 0) & (node < n - 1)
        number = tl.cumsum(waits.to(tl.int32), 0)
        taken = waits & (number <= ROUND)
        above = tl.sum(
            tl.where(taken[None, :] & (number[None, :] == turn[:, None] + 1), node[None, :], 0), 1
        )
        used = turn < tl.sum(waits.to(tl.int32), 0)
        token = tl.where(used, tl.gather(tokens, above, 0), -1).to(tl.int64)
        higher = tl.gather(parents, above, 0)
        highest = tl.gather(parents, higher, 0)
        previous = tl.gather(tokens, higher, 0).to(tl.int64)
        before = tl.gather(tokens, highest, 0).to(tl.int64)
        before = tl.where(above == 0, second, tl.where(higher == 0, first, before))
        previous = tl.where(above == 0, first, previous)
        linked_to = tl.gather(on_chain, above, 0)
        below = tl.where(used, _link_below(links, linked_to, count, CHAIN), -1)
        ids, is_first, odds, _, _, _, _, _, _, _, _ = gather(
            before,
            previous,
            token,
            below,
            run,
            linked_to,
            used & (above == 0),
            own,
            state.roots,
            tables,
            sizes,
            ROUND,
            K,
            WIDTH,
            FEATURES,
        )
        worth = tl.gather(logs, above, 0)[:, None] - tl.log(1.0 + tl.exp(-odds))
        worth = tl.where(is_first & (worth > FLOOR), worth, NONE)
        # The best of old and new nodes
        lane = tl.arange(0, 4 * WIDTH)
        place = turn[:, None] * (4 * WIDTH) + lane[None, :]
        new = _keys(worth, above[:, None], lane[None, :], place, NODES, WIDTH)
        new = tl.topk(tl.reshape(new, [tile]), NODES)
        old = _keys(logs, parents, lanes, tile + node, NODES, WIDTH)
        merged = tl.maximum(old, tl.flip(new, 0))  # first falling, then rising
        merged = tl.bitonic_merge(merged, descending=True)
        valid = merged > 0
        place = (merged % PLACES).to(tl.int32)
        order = (merged // PLACES % ORDERS).to(tl.int32)
        above = tl.where(valid, NODES - 1 - order // (4 * WIDTH), 0)
        lanes = 4 * WIDTH - 1 - order % (4 * WIDTH)
        is_new = valid & (place < tile)
        old_index = tl.where(is_new | ~valid, 0, place - tile)
        token = tl.gather(tl.reshape(ids, [tile]), tl.where(is_new, place, 0), 0)
        tokens = tl.where(is_new, token, tl.gather(tokens, old_index, 0))
        tokens = tl.where(valid, tokens, 0)
        logs = -(0x7FFFFFFF - (merged >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        logs = tl.where(valid, logs, NONE)
        depths = tl.where(valid & (node > 0), tl.gather(depths, above, 0) + 1, 0)
        linked_to = tl.gather(on_chain, above, 0)
        follows = valid & (tokens == _link_below(links, linked_to, count, CHAIN))
        on_chain = tl.where(node == 0, 0, tl.where(follows, linked_to + 1, -1))
        closed = tl.gather(tl.where(taken, 1, closed), old_index, 0)
        closed = tl.where(is_new, tl.where(depths < max_depth, 0, 1), closed)
        closed = tl.where(valid, closed, 1)
        # Parents have moved.
        from_old = tl.where(valid & ~is_new, place - tile, -1)
        here = above[:, None] == from_old[None, :]
        parents = tl.sum(tl.where(here, node[None, :], 0), 1)
        waiting = tl.sum(tl.where((closed == 0) & (node < n - 1), 1, 0), 0)
        rounds_left = tl.where(waiting > 0, rounds_left - 1, 0)
    _write(own, tokens, parents, depths, logs, second, first, draft, sizes, n, NODES)


def nodes_per_round(nodes: int, width: int) -> int:
    """Return how many of ``nodes``, a power of two, ``_propose`` expands at once.

    8; fewer for many candidates, whose comparison needs registers, and more for few, as the
    candidates of a round must be as many as nodes.
    """
    at_once = min(max(nodes // 2, 1), 8, 8192 // (4 * width * width))
    return max(at_once, nodes // (4 * width), 1)


def propose(
    states: Tensor,
    state: State,
    roots: Tensor,
    tables: DeviceTables,
    sizes: tuple[int, int, int],
    max_depth: int,
    draft: DeviceDraft,
    longest_chain: int,
    reach: int,
) -> None:
    """Append roots to the texts, and write the best draft below each, of n nodes.

    Args:
        states: int64 [B], those that get a draft, each of them once.
        state: changed; a text of a negative length stays as it is, and its draft means nothing.
        roots: int64 [S], the last tokens.
        tables: where candidates come from.
        sizes: V, P and T.
        max_depth: of a draft.
        draft: changed.
        longest_chain: most tokens of a chain to draft.
        reach: how many tokens of a text are searched, from its end.
    """
    n, k, c = draft.size, tables.candidates.shape[1], state.chains.shape[1]
    width, nodes = triton.next_power_of_2(k), lanes(n, LEAST_NODES)
    launch(
        _propose,
        (len(states),),
        *(states, state, roots, tables, draft, *sizes),
        *(state.context.shape[1], reach, c, longest_chain, n, max_depth),
        K=k,
        WIDTH=width,
        NODES=nodes,
        ROUND=nodes_per_round(nodes, width),
        CHAIN=triton.next_power_of_2(max(c, 1)),
        FEATURES=tuple(feature_offsets(k)),
        num_warps=PROPOSE_WARPS,
        coalesce=False,
        **REGISTERS,
    )


@triton.jit(do_not_specialize=["n"])
def _likeliest(states, branches, draft, n, NODES: tl.constexpr):
    """Follow the first child from one root down, if that is the draft.

    See ``host.ranking.likeliest``.
    """
    own = tl.load(states + tl.program_id(0))
    node = tl.arange(0, NODES)
    level = tl.arange(0, 4)
    place = own * n + node
    wanted = tl.load(branches + own) != 0
    inside = (node < n) & wanted
    parent = tl.load(draft.parents + place, mask=inside, other=-1)
    there = inside & (node > 0) & (tl.load(draft.valid + place, mask=inside, other=0) != 0)
    last = tl.where(wanted, 0, NODES)
    count = tl.full([], 0, tl.int32)
    while last < NODES:
        # A node of the branch is never before its new place: nothing is lost.
        source, target = own * n + last, own * n + count
        tl.store(draft.tokens + target, tl.load(draft.tokens + source))
        tl.store(draft.scores + target, tl.load(draft.scores + source))
        entry = tl.load(draft.entries + source * LEVELS + level, mask=level < LEVELS, other=-1)
        tl.store(draft.entries + target * LEVELS + level, entry, mask=level < LEVELS)
        key = tl.load(draft.keys + source * LEVELS + level, mask=level < LEVELS, other=0)
        tl.store(draft.keys + target * LEVELS + level, key, mask=level < LEVELS)
        count += 1
        last = tl.min(tl.where(there & (parent == last), node, NODES), 0)
        tl.debug_barrier()  # all lanes have read what is overwritten next
    tl.store(draft.parents + place, tl.maximum(node - 1, 0).to(tl.int64), mask=inside)
    tl.store(draft.depths + place, node.to(tl.int64), mask=inside)
    tl.store(draft.valid + place, node < count, mask=inside)
    behind = inside & (node >= count)
    tl.store(draft.tokens + place, tl.zeros([NODES], tl.int64), mask=behind)
    tl.store(draft.scores + place, tl.zeros([NODES], tl.float32), mask=behind)


def likeliest(states: Tensor, branches: Tensor, draft: DeviceDraft) -> None:
    """Reduce some drafts to their most likely branches; ancestors stay those of the trees.

    Args:
        states: int64 [B], those whose draft is new.
        branches: bool [S], whether a state's draft is to be a branch.
        draft: changed, with the entries that its nodes teach.
    """
    launch(
        _likeliest,
        (len(states),),
        *(states, branches, draft, draft.size),
        NODES=lanes(draft.size, LEAST_NODES),
        num_warps=1,
    )

"""Growing trees, several nodes at a time (see ``host.propose``)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.device.sources import gather, lanes_per_row, locate
from token_recycling.drafting.kernels.device.state import DeviceTables, RootCandidates, Texts
from token_recycling.drafting.kernels.host import context, tree
from token_recycling.util.launch import REGISTERS, launch
from token_recycling.util.vector import LEAST_NODES, lanes

FLOOR = tl.constexpr(tree.FLOOR)
WINDOW = tl.constexpr(context.WINDOW)
NONE = tl.constexpr(-1e30)  # log probability of no candidate
SCAN = tl.constexpr(4096)  # slots of a context that are compared at once
PLACES = tl.constexpr(1 << 14)  # most candidates that are compared in a round
ORDERS = tl.constexpr(1 << 18)  # most parents times lanes
PROPOSE_WARPS = 8


@triton.jit
def _match(tokens, length, root):
    """Find the longest earlier n-gram equal to the last tokens (see ``host.match``).

    Returns:
        The number of tokens that agree, and the slot behind the n-gram.
    """
    best = tl.zeros([SCAN], tl.int64)  # length of a match, then the slot behind it
    for begin in range(1, length, SCAN):
        end = begin + tl.arange(0, SCAN)
        agrees = end < length
        run = tl.zeros([SCAN], tl.int32)
        expected = root
        shift = tl.full([], 0, tl.int64)
        more = shift == 0
        while more:
            here = agrees & (end > shift)
            agrees = here & (tl.load(tokens + end - 1 - shift, mask=here, other=-1) == expected)
            run += agrees.to(tl.int32)
            shift += 1
            more = (shift < WINDOW) & (shift < length) & (tl.sum(agrees.to(tl.int32), 0) > 0)
            expected = tl.load(tokens + length - 1 - shift, mask=more, other=-1).to(tl.int64)
        best = tl.maximum(best, tl.where(run > 0, (run.to(tl.int64) << 32) + end, 0))
    best = tl.max(best, 0)  # the longest match, and of equally long ones the last
    return best >> 32, best & 0xFFFFFFFF


@triton.jit
def _begin(
    state,
    context,
    lengths,
    roots,
    chain,
    counts,
    runs,
    w,
    reach,
    c,
    longest_chain,
    n,
    CHAIN: tl.constexpr,
):
    """Append the root to the context, and search the last ``reach`` tokens for the chain.

    Returns:
        The root, the two tokens before it, the later one last; the tokens that agree; the number
        of tokens of the chain, and these, [CHAIN].
    """
    # The context: in a full row, the root replaces the last token.
    whole_text = context + state * w
    root = tl.load(roots + state)
    before = tl.load(lengths + state)
    is_there = before >= 0
    whole = tl.minimum(tl.maximum(before, 0), w - 1) + 1
    text = whole_text + tl.maximum(whole - reach, 0)
    length = tl.minimum(whole, reach)
    last = length - 1
    first = tl.load(text + last - 1, mask=last > 0, other=-1).to(tl.int64)
    second = tl.load(text + last - 2, mask=last > 1, other=-1).to(tl.int64)
    # The chain
    run, after = _match(text, length, root)
    count = tl.where(run > 0, tl.minimum(length - after, longest_chain), 0)
    link = tl.arange(0, CHAIN)
    slot = after + link
    linked = link < count
    links = tl.load(text + slot, mask=linked & (slot < last), other=0).to(tl.int64)
    links = tl.where(slot == last, root, links)
    tl.store(chain + state * c + link, links, mask=linked)
    tl.debug_barrier()  # all warps have read the length and the context
    tl.store(text + last, root, mask=is_there)
    tl.store(lengths + state, whole, mask=is_there)
    tl.store(counts + state, tl.where(n > 1, count, -1))
    tl.store(runs + state, run)
    return root, second, first, run, count, links


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
def _write(
    state,
    tokens,
    parents,
    depths,
    logs,
    second,
    first,
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
    n,
    NODES: tl.constexpr,
):
    """Write a draft, and the rows and keys to learn into (see ``host.locate``)."""
    node = tl.arange(0, NODES)
    inside = node < n
    valid = logs > NONE / 2
    tokens = tokens.to(tl.int64)
    out = state * n + node
    tl.store(tokens_out + out, tokens, mask=inside)
    tl.store(parents_out + out, parents.to(tl.int64), mask=inside)
    tl.store(depths_out + out, depths.to(tl.int64), mask=inside)
    tl.store(valid_out + out, valid, mask=inside)
    tl.store(scores_out + out, tl.where(valid, tl.exp(logs), 0.0), mask=inside)
    # Rows and keys to learn into
    previous = tl.where(node == 0, first, tl.gather(tokens, parents, 0))
    higher = tl.gather(tl.gather(tokens, parents, 0), parents, 0)
    before = tl.where(node == 0, second, tl.where(parents == 0, first, higher))
    pair_row, pair, has_pair = locate(1, before, previous, tokens, V, P, T)
    triple_row, triple, has_triple = locate(2, before, previous, tokens, V, P, T)
    tl.store(slots_out + out * 3, tokens, mask=inside)
    tl.store(slots_out + out * 3 + 1, tl.where(has_pair, pair_row, -1), mask=inside)
    tl.store(slots_out + out * 3 + 2, tl.where(has_triple, triple_row, -1), mask=inside)
    tl.store(keys_out + out * 3, tl.zeros([NODES], tl.int64), mask=inside)
    tl.store(keys_out + out * 3 + 1, pair, mask=inside)
    tl.store(keys_out + out * 3 + 2, triple, mask=inside)
    # Ancestors: first none, then the nodes on each path to the root.
    for i in range(0, n):
        tl.store(ancestors_out + (state * n + i) * n + node, node < 0, mask=inside)
    tl.debug_barrier()
    path = node
    for _ in range(0, tl.max(depths, 0) + 1):
        tl.store(ancestors_out + out * n + path, node >= 0, mask=inside)
        path = tl.gather(parents, path, 0)
    tl.store(ancestors_out + out * n, node >= 0, mask=inside)


# All numbers of nodes up to ``LEAST_NODES`` share one kernel.
@triton.jit(
    do_not_specialize=["V", "P", "T", "w", "reach", "c", "longest_chain", "n", "max_depth"],
)
def _propose(
    states,
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
):
    """Append the root, search the chain and grow the tree of one row (see ``host.propose``).

    ``host.grow`` expands one node after another. Here, each round expands the ``ROUND`` best nodes
    that have not been, and keeps the best of old and new ones. No child is better than its parent:
    so the tree is the same once no node but the last is left to expand.
    """
    state = tl.load(states + tl.program_id(0))
    node = tl.arange(0, NODES)
    turn = tl.arange(0, ROUND)
    tile: tl.constexpr = ROUND * 4 * WIDTH
    V, P, T = tl.cast(V, tl.int64), tl.cast(P, tl.int64), tl.cast(T, tl.int64)
    root, second, first, run, count, links = _begin(
        state,
        context,
        lengths,
        roots,
        chain,
        counts,
        runs,
        w,
        reach,
        c,
        longest_chain,
        n,
        CHAIN,
    )
    own_ids, own_p = root_ids + state * (K - 1), root_p + state * (K - 1)
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
            own_ids,
            own_p,
            rejected + state,
            V,
            P,
            T,
            candidates,
            probabilities,
            keys,
            weights,
            logits,
            classes,
            ROUND,
            K,
            WIDTH,
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
    _write(
        state,
        tokens,
        parents,
        depths,
        logs,
        second,
        first,
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
        n,
        NODES,
    )


def nodes_per_round(nodes: int, width: int) -> int:
    """Return how many of ``nodes``, a power of two, ``_propose`` expands at once.

    8; fewer for many candidates, whose comparison needs registers, and more for few, as the
    candidates of a round must be as many as nodes.
    """
    at_once = min(max(nodes // 2, 1), 8, 8192 // (4 * width * width))
    return max(at_once, nodes // (4 * width), 1)


def propose(
    states: Tensor,
    texts: Texts,
    roots: Tensor,
    own: RootCandidates,
    tables: DeviceTables,
    draft: DraftTree,
    slots: Tensor,
    slot_keys: Tensor,
    longest_chain: int,
    max_depth: int,
    reach: int,
) -> None:
    """Append roots to the texts, and write the best draft below each, of n nodes.

    Args:
        states: int64 [B], those that get a draft, each of them once.
        texts: changed; one of a negative length stays as it is, and its draft means nothing.
        roots: int64 [S], the last tokens.
        own: candidates for the roots.
        tables: where other candidates come from.
        draft: [S, n], changed.
        slots: int64 [S, n, 3]; gets the lines of the tables that each node will teach.
        slot_keys: int64 [S, n, 3]; gets their keys.
        longest_chain: most tokens of a chain to draft.
        max_depth: of a draft.
        reach: how many tokens of a text are searched, from its end.
    """
    n, width = draft.size, lanes_per_row(tables.candidates)
    nodes = lanes(n, LEAST_NODES)
    launch(
        _propose,
        (len(states),),
        states,
        *texts[:2],
        roots,
        *texts[2:],
        *own,
        *tables[:6],
        *(draft.tokens, draft.parents, draft.depths, draft.ancestors, draft.valid, draft.scores),
        *(slots, slot_keys),
        *tables.sizes,
        texts.context.shape[1],
        reach,
        texts.chains.shape[1],
        longest_chain,
        n,
        max_depth,
        K=tables.k,
        WIDTH=width,
        NODES=nodes,
        ROUND=nodes_per_round(nodes, width),
        CHAIN=triton.next_power_of_2(max(texts.chains.shape[1], 1)),
        num_warps=PROPOSE_WARPS,
        coalesce=False,
        **REGISTERS,
    )


@triton.jit(do_not_specialize=["n"])
def _likeliest(
    states,
    branches,
    tokens,
    parents,
    depths,
    valid,
    scores,
    slots,
    slot_keys,
    n,
    NODES: tl.constexpr,
):
    """Follow the first child from one root down (see ``host.likeliest``), if that is the draft."""
    state = tl.load(states + tl.program_id(0))
    node = tl.arange(0, NODES)
    level = tl.arange(0, 4)
    place = state * n + node
    wanted = tl.load(branches + state) != 0
    inside = (node < n) & wanted
    parent = tl.load(parents + place, mask=inside, other=-1)
    there = inside & (node > 0) & (tl.load(valid + place, mask=inside, other=0) != 0)
    last = tl.where(wanted, 0, NODES)
    count = tl.full([], 0, tl.int32)
    while last < NODES:
        # A node of the branch is never before its new place: nothing is lost.
        source, target = state * n + last, state * n + count
        tl.store(tokens + target, tl.load(tokens + source))
        tl.store(scores + target, tl.load(scores + source))
        line = tl.load(slots + source * 3 + level, mask=level < 3, other=-1)
        tl.store(slots + target * 3 + level, line, mask=level < 3)
        key = tl.load(slot_keys + source * 3 + level, mask=level < 3, other=0)
        tl.store(slot_keys + target * 3 + level, key, mask=level < 3)
        count += 1
        last = tl.min(tl.where(there & (parent == last), node, NODES), 0)
        tl.debug_barrier()  # all lanes have read what is overwritten next
    tl.store(parents + place, tl.maximum(node - 1, 0).to(tl.int64), mask=inside)
    tl.store(depths + place, node.to(tl.int64), mask=inside)
    tl.store(valid + place, node < count, mask=inside)
    behind = inside & (node >= count)
    tl.store(tokens + place, tl.zeros([NODES], tl.int64), mask=behind)
    tl.store(scores + place, tl.zeros([NODES], tl.float32), mask=behind)


def likeliest(
    states: Tensor, branches: Tensor, draft: DraftTree, slots: Tensor, slot_keys: Tensor
) -> None:
    """Reduce some drafts to their most likely branches; ancestors stay those of the trees.

    Args:
        states: int64 [B], those whose draft is new.
        branches: bool [S], whether a state's draft is to be a branch.
        draft: [S, n], changed.
        slots: int64 [S, n, 3], the lines that its nodes teach; changed likewise.
        slot_keys: int64 [S, n, 3], their keys; changed likewise.
    """
    launch(
        _likeliest,
        (len(states),),
        *(states, branches, draft.tokens, draft.parents, draft.depths, draft.valid, draft.scores),
        *(slots, slot_keys, draft.size),
        NODES=lanes(draft.size, LEAST_NODES),
        num_warps=1,
    )

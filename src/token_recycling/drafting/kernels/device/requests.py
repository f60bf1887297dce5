"""Steps of a serving engine, whose batches change: what was verified, and what is accepted."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from skinny_kernels.gpu.launch import launch
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.kernels.device.sources import LEVELS, locate
from token_recycling.drafting.kernels.device.state import DeviceDraft
from token_recycling.drafting.kernels.device.vector import LEAST_NODES, lanes
from token_recycling.drafting.kernels.host.state import State


@triton.jit
def _child(parents, tokens, there, node, last, token, NODES: tl.constexpr):
    """Return the first child of a node with this token; ``NODES``: none."""
    fits = there & (node > last) & (parents == last) & (tokens == token)
    return tl.min(tl.where(fits, node, NODES), 0)


@triton.jit(do_not_specialize=["V", "P", "T", "w", "n", "t"])
def _verified(
    states,
    state,
    draft,
    totals,
    prompts,
    sampled,
    firsts,
    valid_out,
    emitted_out,
    path_out,
    counts_out,
    V,
    P,
    T,
    w,
    n,
    t,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
):
    """Find what one row of a step verified; begin its state anew if it is not that of the text."""
    row = tl.program_id(0)
    own = tl.load(states + row)
    new = tl.load(sampled + row).to(tl.int32)
    total = tl.load(totals + own).to(tl.int64)
    before = total - new  # tokens that the step began with, its root included
    text = state.context + own * w
    live = new > 0
    known = (tl.load(state.lengths + own) == before) & (tl.load(prompts + own) < before)
    begins = live & (known == 0)
    # A new text, or one that went on without drafts: its root is the whole draft.
    sizes = (tl.cast(V, tl.int64), tl.cast(P, tl.int64), tl.cast(T, tl.int64))
    root = tl.load(text + before - 1, mask=begins, other=0).to(tl.int64)
    first = tl.load(text + before - 2, mask=begins & (before > 1), other=-1).to(tl.int64)
    second = tl.load(text + before - 3, mask=begins & (before > 2), other=-1).to(tl.int64)
    pair_entry, pair, has_pair = locate(1, second, first, root, sizes)
    triple_entry, triple, has_triple = locate(2, second, first, root, sizes)
    entry, key = draft.entries + own * n * LEVELS, draft.keys + own * n * LEVELS
    rank = tl.arange(0, WIDTH)
    tl.debug_barrier()  # all warps have read the length
    # In the middle of a prompt there is no root to draft below (see ``propose``).
    tl.store(state.lengths + own, tl.where(live, before, -1), mask=begins | (live == 0))
    tl.store(state.chain_lengths + own, before * 0 - 1, mask=begins)
    tl.store(draft.tokens + own * n, root, mask=begins)
    tl.store(entry, root, mask=begins)
    tl.store(entry + 1, tl.where(has_pair, pair_entry, -1), mask=begins)
    tl.store(entry + 2, tl.where(has_triple, triple_entry, -1), mask=begins)
    tl.store(key + 1, pair, mask=begins)
    tl.store(key + 2, triple, mask=begins)
    place = own * (K - 1) + rank
    none = tl.zeros([WIDTH], tl.int32)
    tl.store(state.roots.candidates + place, none - 1, mask=(rank < K - 1) & begins)
    tl.store(state.roots.probabilities + place, none.to(tl.int16), mask=(rank < K - 1) & begins)
    tl.store(state.roots.rejected + own, live & (live == 0), mask=begins)
    # The nodes that were verified, and the path along the tokens that came
    node = tl.arange(0, NODES)
    inside = node < n
    size = tl.load(firsts + row + 1) - tl.load(firsts + row)
    place = own * n + node
    there = inside & (tl.load(draft.valid + place, mask=inside & known & live, other=0) != 0)
    there = (there & (node < size)) | ((node == 0) & live)
    tl.store(valid_out + row * n + node, there, mask=inside)
    parent = tl.load(draft.parents + place, mask=there, other=-1)
    token = tl.load(draft.tokens + place, mask=there & (node > 0), other=-1)
    last = tl.full([], 0, tl.int32)
    for i in range(0, t):
        came = i < new
        truth = tl.load(text + before + i, mask=came, other=-1).to(tl.int64)
        tl.store(emitted_out + row * t + i, truth)
        tl.store(path_out + row * t + i, tl.where(last < NODES, last, -1).to(tl.int64))
        last = _child(parent, token, there & (node > 0), node, last, truth, NODES)
    tl.store(counts_out + row, new.to(tl.int64))


def verified(
    states: Tensor,
    state: State,
    draft: DeviceDraft,
    totals: Tensor,
    prompts: Tensor,
    sampled: Tensor,
    firsts: Tensor,
    sizes: tuple[int, int, int],
) -> tuple[Tensor, Accepted]:
    """Return what a step has verified and accepted, after the engine has extended the texts.

    A text whose state is not that of the step begins anew, with its last token as a draft of one
    node: a new one, one that was preempted, and one that went on without drafts.

    Args:
        states: int64 [B], of the rows of the batch.
        state: its texts have the tokens that came. Where a text begins, its chain is dropped, the
            candidates for its root are cleared, and its length is set.
        draft: the last one of each state; its first node is changed where a text begins.
        totals: int32 [S], tokens of each text.
        prompts: int32 [S], of these, the ones that were there when it was begun or resumed.
        sampled: int32 [B], tokens that came; 0: in the middle of a prompt.
        firsts: int32 [B + 1], index of each row's root in the logits, and their number.
        sizes: V, P and T.

    Returns:
        The nodes that were verified, bool [B, n], and the accepted paths.
    """
    batch, n = len(states), draft.size
    valid = states.new_empty((batch, n), dtype=torch.bool)
    emitted, path = states.new_empty((batch, n)), states.new_empty((batch, n))
    accepted = Accepted(path, emitted, states.new_empty(batch))
    width = state.roots.candidates.shape[1]
    launch(
        _verified,
        (batch,),
        *(states, state, draft, totals, prompts, sampled, firsts),
        *(valid, emitted, path, accepted.counts, *sizes, state.context.shape[1], n, n),
        K=width + 1,
        WIDTH=triton.next_power_of_2(max(width, 1)),
        NODES=lanes(n, LEAST_NODES),
        num_warps=1,
    )
    return valid, accepted


@triton.jit(do_not_specialize=["n", "t"])
def _follow(
    states,
    branches,
    draft,
    tokens,
    choices,
    positions,
    prompts,
    firsts,
    emitted_out,
    counts_out,
    sources_out,
    n,
    t,
    NODES: tl.constexpr,
):
    """Accept the path of one row along the tokens that were chosen after its nodes."""
    row = tl.program_id(0)
    own = tl.load(states + row)
    first = tl.load(firsts + row)
    size = tl.load(firsts + row + 1) - first
    node = tl.arange(0, NODES)
    inside = (node < size) & (node < n)
    # A request has drafts from the token after its prompt on.
    begun = tl.load(positions + first, mask=size > 0, other=0) >= tl.load(prompts + own)
    there = inside & (node > 0) & begun
    place = own * n + node
    there = there & (tl.load(draft.valid + place, mask=there, other=0) != 0)
    parent = tl.load(draft.parents + place, mask=there, other=-1)
    given = tl.load(tokens + first + node, mask=there, other=-1).to(tl.int64)
    token = tl.load(draft.tokens + place, mask=there, other=-1)
    token = tl.where(tl.load(branches + own) != 0, given, token)
    last = tl.full([], 0, tl.int32)
    count = tl.full([], 0, tl.int32)
    source = node
    for i in range(0, t):
        on_path = last < NODES
        choice = tl.load(choices + first + last, mask=on_path, other=-1).to(tl.int64)
        tl.store(emitted_out + row * t + i, tl.where(on_path, choice, 0))
        source = tl.where((node == i) & on_path, last, source)
        count += on_path.to(tl.int32)
        last = _child(parent, token, there, node, last, choice, NODES)
    tl.store(counts_out + row, count)
    tl.store(sources_out + first + node, first + source, mask=inside)


class Followed(NamedTuple):
    """What was accepted.

    Attributes:
        emitted: int64 [B, t], the tokens, 0 behind the last one.
        counts: int32 [B], their number.
        sources: int32 [m], for the first nodes of each row, as many as tokens, the nodes that these
            were chosen after; each of the others itself. In m, never before its own place.
    """

    emitted: Tensor
    counts: Tensor
    sources: Tensor


def follow(
    states: Tensor,
    branches: Tensor,
    draft: DeviceDraft,
    tokens: Tensor,
    choices: Tensor,
    positions: Tensor,
    prompts: Tensor,
    firsts: Tensor,
    longest: int,
) -> Followed:
    """Accept the longest path of each row along ``choices``.

    Args:
        states: int64 [B], of the rows of the batch.
        branches: bool [S], whether a state's draft is a chain; then ``tokens`` count, whose places
            are those of their positions, and else those of ``draft``.
        draft: the last one of each state, which was verified, or its first nodes.
        tokens: [m], the tokens that were verified, the roots included; -1: never accepted.
        choices: int64 [m], the token that was chosen after each of them.
        positions: int64 [m], in their texts.
        prompts: int32 [S], tokens that each text began with or was resumed with.
        firsts: int32 [B + 1], index of each row's root in these, and their number.
        longest: t, most tokens of a path and the one after it.
    """
    batch = len(states)
    emitted = choices.new_empty((batch, longest), dtype=torch.long)
    counts = choices.new_empty(batch, dtype=torch.int32)
    sources = choices.new_empty(len(choices), dtype=torch.int32)
    launch(
        _follow,
        (batch,),
        *(states, branches, draft, tokens, choices, positions, prompts, firsts),
        *(emitted, counts, sources, draft.size, longest),
        NODES=lanes(draft.size, LEAST_NODES),
        num_warps=1,
    )
    return Followed(emitted, counts, sources)


@triton.jit(do_not_specialize=["n"])
def _place(states, draft, starts, firsts, positions, paths_out, depths_out, n, NODES: tl.constexpr):
    """Place the queries of one row: a draft by its depths, anything else as a chain."""
    row = tl.program_id(0)
    own = tl.load(states + row)
    start = tl.load(starts + row)
    queries = tl.load(starts + row + 1) - start
    size = tl.load(firsts + row + 1) - tl.load(firsts + row)
    node = tl.arange(0, NODES)
    inside = (node < queries) & (queries <= n)
    drafted = inside & (size == queries)
    place = own * n + node
    depth = tl.load(draft.depths + place, mask=drafted, other=0).to(tl.int32)
    depth = tl.where(drafted, depth, node)
    root = tl.load(positions + start)
    tl.debug_barrier()  # all lanes have read it
    tl.store(positions + start + node, root + depth, mask=drafted)
    out = row * n + node
    tl.store(depths_out + out, depth + 1, mask=inside)
    last = node
    for i in range(0, tl.max(tl.where(inside, depth, 0), 0) + 1):
        there = inside & (i <= depth)
        tl.store(paths_out + out * n + depth - i, last, mask=there)
        above = tl.load(draft.parents + own * n + last, mask=there & drafted, other=0).to(tl.int32)
        last = tl.where(drafted, above, tl.maximum(last - 1, 0))


def place(
    states: Tensor,
    draft: DeviceDraft,
    starts: Tensor,
    firsts: Tensor,
    positions: Tensor,
    paths: Tensor,
    depths: Tensor,
) -> None:
    """Place the queries of a step whose rows verify drafts, read prompts or do neither.

    Args:
        states: int64 [B], of the rows of the batch.
        draft: the last one of each state; a row verifies the first nodes of it if it has
            as many queries as logits.
        starts: int32 [B + 1], the first query of each row, and their number.
        firsts: int32 [B + 1], the first logits of each row, and their number.
        positions: int64 [t], in the texts, as if all drafts were chains; changed.
        paths: int32 [R, n, n], B of them changed: of each query, those of the row from the first to
            it that it follows (see ``TreeView``). Rows of more than n queries are left out.
        depths: int32 [R, n], their numbers; changed likewise.
    """
    launch(
        _place,
        (len(states),),
        *(states, draft, starts, firsts, positions, paths, depths, draft.size),
        NODES=lanes(draft.size, LEAST_NODES),
        num_warps=1,
    )

"""Steps of a serving engine, whose batches change: what was verified, and what is accepted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.device.sources import locate
from token_recycling.drafting.kernels.device.state import RootCandidates, Texts
from token_recycling.util.launch import launch
from token_recycling.util.vector import LEAST_NODES, lanes


@triton.jit
def _child(parents, tokens, there, node, last, token, NODES: tl.constexpr):
    """Return the first child of a node with this token; ``NODES``: none."""
    fits = there & (node > last) & (parents == last) & (tokens == token)
    return tl.min(tl.where(fits, node, NODES), 0)


@triton.jit(do_not_specialize=["V", "P", "T", "w", "n", "t"])
def _verified(
    states,
    context,
    lengths,
    counts,
    root_ids,
    root_p,
    rejected,
    tokens,
    parents,
    drafted,
    slots,
    slot_keys,
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
    state = tl.load(states + row)
    new = tl.load(sampled + row).to(tl.int32)
    total = tl.load(totals + state).to(tl.int64)
    before = total - new  # tokens that the step began with, its root included
    text = context + state * w
    live = new > 0
    known = (tl.load(lengths + state) == before) & (tl.load(prompts + state) < before)
    begins = live & (known == 0)
    # A new text, or one that went on without drafts: its root is the whole draft.
    V, P, T = tl.cast(V, tl.int64), tl.cast(P, tl.int64), tl.cast(T, tl.int64)
    root = tl.load(text + before - 1, mask=begins, other=0).to(tl.int64)
    first = tl.load(text + before - 2, mask=begins & (before > 1), other=-1).to(tl.int64)
    second = tl.load(text + before - 3, mask=begins & (before > 2), other=-1).to(tl.int64)
    pair_row, pair, has_pair = locate(1, second, first, root, V, P, T)
    triple_row, triple, has_triple = locate(2, second, first, root, V, P, T)
    line = slots + state * n * 3
    key = slot_keys + state * n * 3
    rank = tl.arange(0, WIDTH)
    tl.debug_barrier()  # all warps have read the length
    # In the middle of a prompt there is no root to draft below (see ``propose``).
    tl.store(lengths + state, tl.where(live, before, -1), mask=begins | (live == 0))
    tl.store(counts + state, before * 0 - 1, mask=begins)
    tl.store(tokens + state * n, root, mask=begins)
    tl.store(line, root, mask=begins)
    tl.store(line + 1, tl.where(has_pair, pair_row, -1), mask=begins)
    tl.store(line + 2, tl.where(has_triple, triple_row, -1), mask=begins)
    tl.store(key + 1, pair, mask=begins)
    tl.store(key + 2, triple, mask=begins)
    own = state * (K - 1) + rank
    none = tl.zeros([WIDTH], tl.int32)
    tl.store(root_ids + own, none - 1, mask=(rank < K - 1) & begins)
    tl.store(root_p + own, none.to(tl.int16), mask=(rank < K - 1) & begins)
    tl.store(rejected + state, live & (live == 0), mask=begins)
    # The nodes that were verified, and the path along the tokens that came
    node = tl.arange(0, NODES)
    inside = node < n
    size = tl.load(firsts + row + 1) - tl.load(firsts + row)
    place = state * n + node
    there = inside & (tl.load(drafted + place, mask=inside & known & live, other=0) != 0)
    there = (there & (node < size)) | ((node == 0) & live)
    tl.store(valid_out + row * n + node, there, mask=inside)
    parent = tl.load(parents + place, mask=there, other=-1)
    token = tl.load(tokens + place, mask=there & (node > 0), other=-1)
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
    texts: Texts,
    own: RootCandidates,
    draft: DraftTree,
    slots: Tensor,
    slot_keys: Tensor,
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
        texts: with the tokens that came; chains and lengths of texts that begin are changed.
        own: candidates for the roots; those of texts that begin are cleared.
        draft: [S, n], the last draft of each state; its first node is changed where a text begins.
        slots: int64 [S, n, 3], the lines that each node teaches; changed likewise.
        slot_keys: int64 [S, n, 3], their keys; changed likewise.
        totals: int32 [S], tokens of each text.
        prompts: int32 [S], of these, the ones that were there when it was begun or resumed.
        sampled: int32 [B], tokens that came; 0: in the middle of a prompt.
        firsts: int32 [B + 1], index of each row's root in the logits, and their number.
        sizes: of the tables (see ``DeviceTables.sizes``).

    Returns:
        The nodes that were verified, bool [B, n], and the accepted paths.
    """
    batch, n = len(states), draft.size
    valid = states.new_empty((batch, n), dtype=torch.bool)
    emitted, path = states.new_empty((batch, n)), states.new_empty((batch, n))
    accepted = Accepted(path, emitted, states.new_empty(batch))
    width = own.candidates.shape[1]
    launch(
        _verified,
        (batch,),
        states,
        *(texts.context, texts.lengths, texts.chain_lengths),
        *own,
        *(draft.tokens, draft.parents, draft.valid),
        *(slots, slot_keys),
        *(totals, prompts, sampled, firsts),
        *(valid, emitted, path, accepted.counts),
        *sizes,
        texts.context.shape[1],
        n,
        n,
        K=width + 1,
        WIDTH=triton.next_power_of_2(max(width, 1)),
        NODES=lanes(n, LEAST_NODES),
        num_warps=1,
    )
    return valid, accepted


@triton.jit(do_not_specialize=["n", "t"])
def _follow(
    states,
    parents,
    drafted,
    tokens,
    choices,
    firsts,
    emitted_out,
    counts_out,
    n,
    t,
    NODES: tl.constexpr,
):
    """Accept the path of one row along the tokens that were chosen after its nodes."""
    row = tl.program_id(0)
    state = tl.load(states + row)
    first = tl.load(firsts + row)
    node = tl.arange(0, NODES)
    there = (node > 0) & (node < tl.load(firsts + row + 1) - first)
    place = state * n + node
    there = there & (node < n)
    there = there & (tl.load(drafted + place, mask=there, other=0) != 0)
    parent = tl.load(parents + place, mask=there, other=-1)
    token = tl.load(tokens + first + node, mask=there, other=-1).to(tl.int64)
    last = tl.full([], 0, tl.int32)
    count = tl.full([], 0, tl.int32)
    for i in range(0, t):
        on_path = last < NODES
        choice = tl.load(choices + first + last, mask=on_path, other=-1).to(tl.int64)
        tl.store(emitted_out + row * t + i, tl.where(on_path, choice, 0))
        count += on_path.to(tl.int32)
        last = _child(parent, token, there, node, last, choice, NODES)
    tl.store(counts_out + row, count)


def follow(
    states: Tensor, draft: DraftTree, tokens: Tensor, choices: Tensor, firsts: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Accept the longest path of each row along ``choices``.

    Args:
        states: int64 [B], of the rows of the batch.
        draft: [S, n], the last draft of each state, which was verified, or its first nodes.
        tokens: [m], the tokens that were verified, the roots included; -1: never accepted.
        choices: int64 [m], the token that was chosen after each of them.
        firsts: int32 [B + 1], index of each row's root in these, and their number.
        longest: t, most tokens of a path and the one after it.

    Returns:
        The tokens int64 [B, t], 0 behind the last one, and their number, int32 [B].
    """
    batch = len(states)
    emitted = choices.new_empty((batch, longest), dtype=torch.long)
    counts = choices.new_empty(batch, dtype=torch.int32)
    launch(
        _follow,
        (batch,),
        states,
        *(draft.parents, draft.valid),
        tokens,
        choices,
        firsts,
        emitted,
        counts,
        draft.size,
        longest,
        NODES=lanes(draft.size, LEAST_NODES),
        num_warps=1,
    )
    return emitted, counts

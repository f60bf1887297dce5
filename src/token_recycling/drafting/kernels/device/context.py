"""Texts on a GPU: the root is appended, and the longest match searched (see ``host.context``)."""

from __future__ import annotations

import triton
import triton.language as tl

from token_recycling.drafting.kernels.host import context

WINDOW = tl.constexpr(context.WINDOW)
SCAN = tl.constexpr(4096)  # slots of a context that are compared at once


@triton.jit
def _match(tokens, length, root):
    """Find the longest earlier n-gram equal to the last tokens (see ``host.context.match``).

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
def begin_draft(own, state, roots, w, reach, c, longest_chain, n, CHAIN: tl.constexpr):
    """Append the root to a context, and search the last ``reach`` tokens for the chain.

    Returns:
        The root, the two tokens before it, the later one last; the tokens that agree; the number
        of tokens of the chain, and these, [CHAIN].
    """
    # The context: in a full row, the root replaces the last token.
    root = tl.load(roots + own)
    before = tl.load(state.lengths + own)
    is_there = before >= 0
    whole = tl.minimum(tl.maximum(before, 0), w - 1) + 1
    text = state.context + own * w + tl.maximum(whole - reach, 0)
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
    tl.store(state.chains + own * c + link, links, mask=linked)
    tl.debug_barrier()  # all warps have read the length and the context
    tl.store(text + last, root, mask=is_there)
    tl.store(state.lengths + own, whole, mask=is_there)
    tl.store(state.chain_lengths + own, tl.where(n > 1, count, -1))
    tl.store(state.match_lengths + own, run)
    return root, second, first, run, count, links

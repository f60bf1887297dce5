"""Texts of the sequences: n-gram match, and what is appended."""

from __future__ import annotations

from skinny_kernels.compiled import compiled
from token_recycling.drafting.kernels.host.state import Array
from token_recycling.util.tokens import NO_TOKEN

WINDOW = 16  # longest n-gram that is compared


@compiled
def match(context: Array, length: int, window: int, chain: Array) -> tuple[int, int]:
    """Find the longest earlier n-gram equal to the last tokens; of equally long ones the latest.

    In 5 8 9 4 8 9 6 8 9 the last two tokens, 8 9, are found twice before, preceded by 5 and by 4,
    and not by the 6 that precedes them now. The later occurrence wins: 2 tokens agree, and the
    chain is 6 8 9.

    Args:
        context: int64 [≥ length], the row's tokens.
        length: number of tokens.
        window: most tokens compared.
        chain: int64 [c], gets the tokens that followed the match.

    Returns:
        The number of tokens that agree, 0 without a match, and that of tokens written to ``chain``.
    """
    run = 0
    after = 0
    last = context[length - 1]
    for end in range(length - 1, 0, -1):  # slot after the n-gram
        if context[end - 1] != last:
            continue
        if run > 0 and (end <= run or context[end - 1 - run] != context[length - 1 - run]):
            continue  # cannot be longer
        agree = 1
        while (
            agree < window
            and agree < end
            and context[end - 1 - agree] == context[length - 1 - agree]
        ):
            agree += 1
        if agree > run:
            run = agree
            after = end
            if run == window:
                break
    count = 0
    if run > 0:
        count = min(len(chain), length - after)
        for i in range(count):
            chain[i] = context[after + i]
    return run, count


@compiled
def ending(context: Array, length: int) -> tuple[int, int]:
    """Return the tokens before the root, the earlier one first; ``NO_TOKEN``: none."""
    last = context[length - 2] if length > 1 else NO_TOKEN
    before = context[length - 3] if length > 2 else NO_TOKEN
    return before, last


@compiled
def preceding(node: int, tokens: Array, parents: Array, before: int, last: int) -> tuple[int, int]:
    """Return the tokens before a node; ``before`` and ``last`` precede the root."""
    if node == 0:
        return before, last
    above = parents[node]
    if above == 0:
        return last, tokens[0]
    return tokens[parents[above]], tokens[above]


@compiled
def append_roots(context: Array, lengths: Array, roots: Array) -> None:
    """Append one token to each row; in a full row it replaces the last one.

    Args:
        context: int64 [B, w], modified.
        lengths: int64 [B], modified.
        roots: int64 [B].
    """
    for row in range(len(lengths)):
        last = min(lengths[row], context.shape[1] - 1)
        context[row, last] = roots[row]
        lengths[row] = last + 1


@compiled
def extend_contexts(context: Array, lengths: Array, emitted: Array) -> None:
    """Append the emitted tokens to each row, except for the last, which is the next root.

    Args:
        context: int64 [B, w], modified.
        lengths: int64 [B], modified.
        emitted: int64 [B, t], padded with ``NO_TOKEN``.
    """
    for row in range(len(lengths)):
        for i in range(emitted.shape[1] - 1):
            if emitted[row, i + 1] < 0 or lengths[row] == context.shape[1]:
                break
            context[row, lengths[row]] = emitted[row, i]
            lengths[row] += 1


@compiled
def copy_chains(context: Array, lengths: Array, window: int, tokens: Array, valid: Array) -> None:
    """Write the tokens after each row's longest match behind the roots (see ``match``).

    Args:
        context: int64 [B, w], the roots included.
        lengths: int64 [B].
        window: most tokens compared.
        tokens: int64 [B, n], gets the chains from column 1 on.
        valid: bool [B, n], gets True where there is a token.
    """
    for row in range(len(lengths)):
        tokens[row] = 0
        valid[row] = False
        tokens[row, 0] = context[row, lengths[row] - 1]
        _, count = match(context[row], lengths[row], window, tokens[row, 1:])
        valid[row, : count + 1] = True

"""Learning from a verified draft: entries, acceptance rates, weights, candidates for the root."""

from __future__ import annotations

import math

import numpy as np

from skinny_kernels.compiled import compiled
from token_recycling.drafting.kernels.host.context import ending, extend_contexts, preceding
from token_recycling.drafting.kernels.host.entries import TINY, learn_node, to_half
from token_recycling.drafting.kernels.host.rates import refresh_logit
from token_recycling.drafting.kernels.host.state import (
    CONSTANT,
    INPUTS,
    NO_CHAIN,
    PATTERN,
    SETS,
    SOURCES,
    Array,
    State,
    Tables,
    Verified,
)
from token_recycling.drafting.kernels.host.tree import gather, new_gathered, position
from token_recycling.util.tokens import NO_TOKEN

SIBLINGS = 7  # most rejected nodes that a root row is made of
RUNNERS_SHARE = 0.1  # of the runners-up in a root row from rejected nodes
LEARNING_RATE = 0.02  # of the weights
PATTERN_RATE = 0.5  # of the weights of patterns, as a share of it
# Tokens of a step whose gradients count in full. The gradients of a step are taken at the same
# weights, so that those of many rows would move the weights too far: more count as many together.
FULL_TOKENS = 16.0


@compiled
def count(
    row: int, state: State, emitted: Array, tables: Tables, moves: Array, counted: Array
) -> None:
    """Compare the candidates along the emitted tokens of one row with these tokens.

    Counts hits and trials per feature, and sums the gradient of the log likelihood of the weights:
    (hit - score) · log odds of the source (Mahoney, as in ``gather``). Candidates count whether or
    not they were drafted. Log odds and weights stay as they are, so that all rows and tokens of a
    step are compared by the same ones, and a GPU can compare them at once.

    Args:
        row: its index.
        state: of the rows; the last token of a context is the root.
        emitted: int64 [t], padded with ``NO_TOKEN``.
        tables: what has been learnt; the evidence is changed.
        moves: float64 [SETS + PATTERNS, INPUTS], the sum of gradients, changed.
        counted: bool [f], gets True for every feature that was counted.
    """
    context, length, chain = state.context[row], state.lengths[row], state.chains[row]
    nothing = len(tables.rates) - 1
    gathered = new_gathered(tables.candidates.shape[1])
    candidates, features, odds = gathered
    token = context[length - 1]
    before, last = ending(context, length)
    on_chain = True
    for depth in range(len(emitted)):
        truth = emitted[depth]
        if truth < 0:
            break
        below = chain[depth] if on_chain and depth < state.chain_lengths[row] else NO_CHAIN
        candidate_count, weight_set, _ = gather(
            before,
            last,
            token,
            below,
            state.match_lengths[row],
            depth,
            row if depth == 0 else -1,
            state.roots,
            tables,
            gathered,
        )
        for i in range(candidate_count):
            error = -1.0 / (1.0 + math.exp(-odds[i]))
            if candidates[i] == truth:
                error += 1.0
            pattern = SETS + features[i, PATTERN]
            for source in range(SOURCES):
                feature = features[i, source]
                slope = error * tables.logits[feature]
                moves[weight_set, source] += slope
                moves[pattern, source] += PATTERN_RATE * slope
                if feature == nothing:
                    continue
                counted[feature] = True
                tables.evidence[1, feature] += 1
                if candidates[i] == truth:
                    tables.evidence[0, feature] += 1
            moves[weight_set, CONSTANT] += error
            moves[pattern, CONSTANT] += PATTERN_RATE * error
        on_chain = on_chain and below == truth
        before, last, token = last, token, truth


@compiled
def observe(
    state: State,
    verified: Verified,
    tables: Tables,
    old_weight: float,
    learning_rate: float,
) -> None:
    """Learn from a step: evidence, weights and log odds, entries, candidates for the next root.

    All rows of the batch are counted before any entry is averaged; the contexts are extended last.

    Args:
        state: of the rows, modified: contexts get the emitted tokens except for the last one, which
            is the next root.
        verified: the draft and the candidates.
        tables: what has been learnt.
        old_weight: see ``average``.
        learning_rate: of the weights.
    """
    tokens, parents, valid, ids, p, finite, path, emitted = verified
    moves = np.zeros(tables.weights.shape)
    counted = np.zeros(len(tables.rates), np.bool_)
    tokens_counted = 0
    for row in range(len(valid)):
        if valid[row, 0] and state.chain_lengths[row] >= 0:
            count(row, state, emitted[row], tables, moves, counted)
            tokens_counted += (emitted[row] >= 0).sum()
    learning_rate *= min(1.0, FULL_TOKENS / max(tokens_counted, 1))
    for weights in range(len(moves)):
        for source in range(INPUTS):
            tables.weights[weights, source] += learning_rate * moves[weights, source]
    for feature in range(len(counted)):
        if counted[feature]:
            refresh_logit(feature, tables)
    for row in range(len(valid)):
        second, first = ending(state.context[row], state.lengths[row])
        for node in range(tokens.shape[1]):
            if not (valid[row, 0] and valid[row, node] and finite[row, node]):
                continue
            before, last = preceding(node, tokens[row], parents[row], second, first)
            learn_node(
                before,
                last,
                tokens[row, node],
                ids[row, node],
                p[row, node],
                old_weight,
                tables,
            )
        state.roots.rejected[row] = remember(
            parents[row],
            valid[row],
            ids[row],
            p[row],
            finite[row],
            path[row],
            emitted[row],
            state.roots.candidates[row],
            state.roots.probabilities[row],
            state.roots.rejected[row],
        )
    extend_contexts(state.context, state.lengths, emitted)


@compiled
def remember(
    parents: Array,
    valid: Array,
    ids: Array,
    p: Array,
    finite: Array,
    path: Array,
    emitted: Array,
    candidates: Array,
    probabilities: Array,
    before: bool,
) -> bool:
    """Make the root row of one row: what may follow the next root, whose own row is not known yet.

    Where the next root was chosen, the draft had other tokens, whose distributions were computed:
    what follows these often follows the root too. So the row is the mean of the distributions of
    the rejected children of the last accepted node, plus its runners-up: such a token is often the
    one after the root (LogitSpec, arXiv 2507.01449). Without rejected children it is the
    runners-up alone. For example, the root is "a"; "the" was rejected, and "dog" (0.9) and "cat"
    (0.1) were expected after it; "one" alone lost to "a": the row is dog (0.81), one (0.1), cat
    (0.09).

    Args:
        parents: int64 [n], of the draft.
        valid: bool [n]; a row whose root is invalid has ended.
        ids: int64 [n, k], the target's best candidates at every node.
        p: float32 [n, k].
        finite: bool [n], False where these must not be used.
        path: int64 [t], the accepted nodes (see ``Verified``).
        emitted: int64 [t], padded with ``NO_TOKEN``; the last one is the next root.
        candidates: int32 [k - 1], gets the row's candidates, padded with ``NO_TOKEN``.
        probabilities: uint16 [k - 1], gets the bits of their float16 probabilities.
        before: result of the last call for this row.

    Returns:
        True if the row has rejected children among its sources; ``before`` if it has ended.
    """
    if not valid[0] or emitted[0] < 0:
        return before
    depth = 0
    while depth + 1 < len(emitted) and emitted[depth + 1] >= 0 and path[depth + 1] > 0:
        depth += 1
    last, chosen = path[depth], emitted[depth]
    candidates[:] = NO_TOKEN
    probabilities[:] = 0
    if not finite[last]:
        return False
    k = ids.shape[1]
    siblings = np.empty(SIBLINGS, np.int64)
    count = 0
    for node in range(last + 1, len(parents)):
        if count < SIBLINGS and valid[node] and finite[node] and parents[node] == last:
            siblings[count] = node
            count += 1
    union = np.empty((SIBLINGS + 1) * k, np.int64)
    mixed = np.zeros((SIBLINGS + 1) * k)
    n = 0
    for i in range(count):
        for rank in range(k):
            part = (1.0 - RUNNERS_SHARE) / count * p[siblings[i], rank]
            n = add_share(ids[siblings[i], rank], part, union, mixed, n)
    lost = 0.0
    for rank in range(k):
        if ids[last, rank] != chosen:
            lost += p[last, rank]
    share = RUNNERS_SHARE if count > 0 else 1.0
    for rank in range(k):
        if ids[last, rank] != chosen:
            part = share * p[last, rank] / max(lost, TINY)
            n = add_share(ids[last, rank], part, union, mixed, n)
    for rank in range(min(len(candidates), n)):
        best = 0
        for i in range(n):
            if mixed[i] > mixed[best]:
                best = i
        candidates[rank] = union[best]
        probabilities[rank] = to_half(min(mixed[best], 1.0))
        mixed[best] = -1.0
    return count > 0


@compiled
def add_share(candidate: int, share: float, union: Array, mixed: Array, n: int) -> int:
    """Add to the share of a candidate in the union of ``n``; return the size of the union."""
    at = position(candidate, union, n)
    if at == n:
        union[n] = candidate
        n += 1
    mixed[at] += share
    return n

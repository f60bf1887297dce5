"""Growing draft trees: candidates of a node, their mixed scores, best-first growth."""

from __future__ import annotations

import math

import numpy as np

from skinny_kernels.compiled import compiled
from token_recycling.drafting.kernels.host.context import (
    WINDOW,
    append_roots,
    ending,
    match,
    preceding,
)
from token_recycling.drafting.kernels.host.entries import find
from token_recycling.drafting.kernels.host.rates import (
    BIN_OF,
    BINS,
    DEPTHS,
    LONG,
    RUNS,
    class_of,
    feature_offsets,
)
from token_recycling.drafting.kernels.host.state import (
    CHAIN,
    CONSTANT,
    LEVELS,
    NO_CHAIN,
    PATTERN,
    REJECTED,
    ROOT_ROW,
    RUNNERS_UP,
    SETS,
    SOURCES,
    Array,
    Drafts,
    Gathered,
    RootArrays,
    State,
    Tables,
)

LEAST, MOST = -9.0, 6.0  # bounds of a mixture's log odds
FLOOR = math.log(1e-4)  # nodes with a lower log probability are not proposed


@compiled
def position(candidate: int, candidates: Array, count: int) -> int:
    """Return the index of a candidate among the first ``count``, or ``count``."""
    at = 0
    while at < count and candidates[at] != candidate:
        at += 1
    return at


@compiled
def new_gathered(k: int) -> Gathered:
    """Return arrays for the candidates of a node."""
    size = (LEVELS + 1) * k
    return Gathered(
        np.empty(size, np.int64), np.empty((size, SOURCES + 1), np.int64), np.empty(size)
    )


@compiled
def gather(
    before: int,
    last: int,
    token: int,
    below: int,
    run: int,
    depth: int,
    root_row: int,
    roots: RootArrays,
    tables: Tables,
    gathered: Gathered,
) -> tuple[int, int, int]:
    """Unite the candidates of all sources at a node, and mix what these say of each.

    A source says how likely a candidate is by the log odds of its feature. The score's log odds are
    a weighted sum of these: logistic mixing, from data compression (M. Mahoney, "Adaptive weighing
    of context models for lossless data compression", Florida Tech CS-2005-16). The weights are the
    sum of two sets, one for the rows and the chain that the node has, and one for the sources that
    have the candidate. For example, a token row with log odds of -1 and weight 0.5, a pair row with
    1 and weight 0.8, and a constant of 0.1 give 0.4: a score of 0.6.

    Args:
        before: the token before ``last``.
        last: the token before ``token``; ``NO_TOKEN``: none.
        token: the node's token.
        below: the chain's next token, or ``NO_CHAIN``.
        run: length of the match that gave the chain.
        depth: number of chain tokens above this one.
        root_row: index of the node's root row, -1 for every node but the root.
        roots: the root rows.
        tables: what has been learnt.
        gathered: gets the candidates.

    Returns:
        The number of candidates, the weight set of the node, and the index of the chain's token
        among the candidates, -1 where there is none.
    """
    k = tables.candidates.shape[1]
    offsets = feature_offsets(k)
    n = 0
    rows_there = 0
    lacks = np.full(SOURCES, offsets.nothing)  # by source
    for level in range(LEVELS - 1, -1, -1):
        row = find(level, before, last, token, tables)
        if row < 0:
            continue
        if level > 0:
            rows_there += level
        n = add_row(
            level,
            level,
            tables.candidates[row],
            tables.probabilities[row],
            k,
            offsets.lacking,
            lacks,
            n,
            gathered,
        )
    on_chain = -1
    state = 0
    if below >= 0:
        state = 2 if run >= LONG else 1
        length = class_of(run, RUNS)
        lacks[CHAIN] = offsets.beside + length
        for i in range(n):
            gathered.features[i, CHAIN] = lacks[CHAIN]
        on_chain = position(below, gathered.candidates, n)
        if on_chain == n:
            gathered.candidates[n] = below
            for source in range(SOURCES):
                gathered.features[n, source] = lacks[source]
            gathered.features[n, PATTERN] = 0
            n += 1
        on_depth = length * len(DEPTHS) + class_of(depth, DEPTHS)
        gathered.features[on_chain, CHAIN] = offsets.chain + on_depth
        gathered.features[on_chain, PATTERN] |= 1 << CHAIN
    if root_row >= 0 and k > 1 and roots.candidates[root_row, 0] >= 0:
        n = add_row(
            REJECTED if roots.rejected[root_row] else RUNNERS_UP,
            ROOT_ROW,
            roots.candidates[root_row],
            roots.probabilities[root_row],
            k,
            offsets.lacking,
            lacks,
            n,
            gathered,
        )
    weight_set = rows_there * 3 + state
    for i in range(n):
        pattern = SETS + gathered.features[i, PATTERN]
        total = tables.weights[weight_set, CONSTANT] + tables.weights[pattern, CONSTANT]
        for source in range(SOURCES):
            weight = tables.weights[weight_set, source] + tables.weights[pattern, source]
            total += weight * tables.logits[gathered.features[i, source]]
        gathered.odds[i] = min(MOST, max(LEAST, total))
    return n, weight_set, on_chain


@compiled
def add_row(
    kind: int,
    source: int,
    candidates: Array,
    probabilities: Array,
    k: int,
    lacking: int,
    lacks: Array,
    n: int,
    gathered: Gathered,
) -> int:
    """Unite the candidates of a row with those found so far (see ``gather``).

    Args:
        kind: of the row, which its features depend on.
        source: column of the features.
        candidates: int32 [≤ k], best first, padded with ``NO_TOKEN``.
        probabilities: uint16, of the same size.
        k: of the matrix.
        lacking: see ``feature_offsets``.
        lacks: int64 [SOURCES], the features of a candidate that no source has, modified.
        n: number of candidates found so far.
        gathered: gets the candidates.

    Returns:
        The number of candidates.
    """
    lacks[source] = lacking + kind * BINS + BIN_OF[probabilities[0]]
    for i in range(n):
        gathered.features[i, source] = lacks[source]
    others = n
    for rank in range(len(candidates)):
        candidate = candidates[rank]
        if candidate < 0:
            break
        at = position(candidate, gathered.candidates, others)
        if at == others:
            at = n
            gathered.candidates[at] = candidate
            for other in range(SOURCES):
                gathered.features[at, other] = lacks[other]
            gathered.features[at, PATTERN] = 0
            n += 1
        gathered.features[at, source] = (kind * k + rank) * BINS + BIN_OF[probabilities[rank]]
        gathered.features[at, PATTERN] |= 1 << source
    return n


@compiled
def grow(row: int, state: State, tables: Tables, max_depth: int, drafts: Drafts) -> None:
    """Grow the tree of one row best-first; a node's score is the product along its path.

    Pending candidates are kept sorted, and only as many as nodes are still missing. On equal
    scores the one that was found first wins. If the root's candidates are A with 0.6 and B with
    0.3, and A's are C with 0.7 and D with 0.2, the nodes are A (0.6), C (0.42), B (0.3), D (0.12).

    Args:
        row: its index.
        state: of the rows; the last token of a context is the root.
        tables: what has been learnt.
        max_depth: of the tree.
        drafts: gets the tree.
    """
    context, length, chain = state.context[row], state.lengths[row], state.chains[row]
    tokens, parents, depths = drafts.tokens[row], drafts.parents[row], drafts.depths[row]
    ancestors, valid, scores = drafts.ancestors[row], drafts.valid[row], drafts.scores[row]
    n, k = len(tokens), tables.candidates.shape[1]
    gathered = new_gathered(k)
    # Log probability, token, parent and chain depth of pending candidates, from ``begin`` on.
    worth = np.empty(2 * n)
    pending = np.empty((2 * n, 3), np.int64)
    begin = end = 0
    logs = np.zeros(n)
    on_chain = np.full(n, -1, np.int64)  # chain tokens from the root to a node; -1: off the chain
    tokens[:] = 0
    parents[:] = 0
    depths[:] = 0
    ancestors[:] = False
    for node in range(n):  # invalid nodes are children of the root
        ancestors[node, 0] = ancestors[node, node] = True
    valid[:] = False
    scores[:] = 0.0
    tokens[0] = context[length - 1]
    valid[0] = True
    scores[0] = 1.0
    on_chain[0] = 0
    second, first = ending(context, length)
    node = 0
    grown = 1
    while grown < n:
        if depths[node] < max_depth:
            before, last = preceding(node, tokens, parents, second, first)
            below = NO_CHAIN
            if 0 <= on_chain[node] < state.chain_lengths[row]:
                below = chain[on_chain[node]]
            candidate_count, _, follows = gather(
                before,
                last,
                tokens[node],
                below,
                state.match_lengths[row],
                on_chain[node],
                row if node == 0 else -1,
                state.roots,
                tables,
                gathered,
            )
            missing = n - grown
            for i in range(candidate_count):
                least = FLOOR
                if end - begin == missing and worth[end - 1] > least:
                    least = worth[end - 1]
                # log sigmoid(x) is below min(x, 0), which costs no logarithm.
                if logs[node] + min(gathered.odds[i], 0.0) <= least:
                    continue
                value = logs[node] - math.log1p(math.exp(-gathered.odds[i]))
                if value <= least:
                    continue
                if end - begin < missing:
                    end += 1
                at = end - 1
                while at > begin and worth[at - 1] < value:
                    worth[at] = worth[at - 1]
                    pending[at, 0] = pending[at - 1, 0]
                    pending[at, 1] = pending[at - 1, 1]
                    pending[at, 2] = pending[at - 1, 2]
                    at -= 1
                worth[at] = value
                pending[at, 0] = gathered.candidates[i]
                pending[at, 1] = node
                pending[at, 2] = on_chain[node] + 1 if i == follows else -1
        if begin == end:
            return
        above = pending[begin, 1]
        node = grown
        tokens[node] = pending[begin, 0]
        parents[node] = above
        depths[node] = depths[above] + 1
        for i in range(grown):
            ancestors[node, i] = ancestors[above, i]
        ancestors[node, node] = valid[node] = True
        logs[node] = worth[begin]
        scores[node] = math.exp(worth[begin])
        on_chain[node] = pending[begin, 2]
        begin += 1
        grown += 1


@compiled
def propose(state: State, roots: Array, tables: Tables, max_depth: int, drafts: Drafts) -> None:
    """Append the roots, search the chain of every row and grow its tree (see ``grow``).

    Args:
        state: of the rows, modified.
        roots: int64 [B]; in a full row, the root replaces the last token.
        tables: what has been learnt.
        max_depth: of a tree.
        drafts: gets the trees.
    """
    context, lengths, chains = state.context, state.lengths, state.chains
    append_roots(context, lengths, roots)
    for row in range(len(lengths)):
        state.match_lengths[row], state.chain_lengths[row] = match(
            context[row], lengths[row], WINDOW, chains[row]
        )
        grow(row, state, tables, max_depth, drafts)

"""Drafting and learning on the host: n-gram match, look-up, growth, averaging and counting.

All functions work on NumPy arrays. ``propose`` and ``observe`` handle all rows of a batch in one
call; the others are their parts. Shapes use B rows of a
batch, n nodes, k candidates, V tokens in the vocabulary, P slots for pairs and T for triples.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from token_recycling.util.compiled import compiled
from token_recycling.util.tokens import NO_TOKEN

LEVELS = 3  # rows of the token, of the pair that ends with it, and of the triple
# Levels of the root row, if it comes from the runners-up alone, or from rejected nodes too
RUNNERS_UP, REJECTED = LEVELS, LEVELS + 1
INPUTS = LEVELS + 3  # of the mixture: one per level, the chain, the root row, and a constant
SETS = 12  # weight sets of a node: pair row or not, triple row or not, chain state
# Weight sets of a candidate, by the sources that have it: the rows by level, chain, root row
PATTERNS = 32
BINS = 32  # classes of a probability: its log odds from -9 on, in steps of 1/2
LONG = 4  # length from which a match is long, in tokens
RUNS = np.array([0, 1, 2, 3, 4, 5, 7, 10, 16])  # lower bound of each class of match lengths
DEPTHS = np.array([0, 1, 2, 4, 8])  # lower bound of each class of depths in the chain
PRIOR = 30.0  # weight of the expected rate, in trials

# Expected rates, fitted by lab/fit.py to 59 answers of SmolLM2-135M-Instruct.
# Per level, the log odds of the rate of a row's candidate: a + b · log odds of its probability
# + c · log2(1 + rank), and of a candidate that the row lacks: a + b · log odds of the row's best.
IN_ROW = np.array(
    [
        [-0.58, 0.63, -0.32],
        [-0.38, 0.65, -0.40],
        [-0.14, 0.64, -0.57],
        [-2.81, 0.06, -0.41],
        [-1.49, 0.44, -0.30],
    ]
)
LACKING = np.array([[-3.86, -0.24], [-4.13, -0.35], [-4.28, -0.36], [-3.09, -0.03], [-3.40, -0.04]])
# Per class of match lengths: of the chain's first token, of later ones, and of all other tokens.
FIRST_ON_CHAIN = np.array([0.01, 0.24, 0.47, 0.60, 0.65, 0.75, 0.80, 0.87, 0.95])
LATER_ON_CHAIN = np.array([0.01, 0.60, 0.69, 0.71, 0.78, 0.81, 0.84, 0.87, 0.93])
BESIDE_CHAIN = np.array([0.01, 0.032, 0.022, 0.018, 0.013, 0.010, 0.009, 0.007, 0.004])
LOWEST, HIGHEST = 0.0005, 0.995  # bounds of calibrated rates
SIBLINGS = 7  # most rejected nodes that a root row is made of
RUNNERS_SHARE = 0.1  # of the runners-up in a root row from rejected nodes
LEAST, MOST = -9.0, 6.0  # bounds of a mixture's log odds
LEARNING_RATE = 0.02  # of the weights
PATTERN_RATE = 0.5  # of the weights of patterns, as a share of it
FLOOR = math.log(1e-4)  # nodes with a lower log probability are not proposed
TINY = 1e-9  # least sum of probabilities that is divided by
WINDOW = 16  # longest n-gram that is compared
NO_CHAIN = -2  # chain token at a node where there is none; differs from every candidate


Array = Any  # a NumPy array; numba derives dtype and shape from the call


class Tables(NamedTuple):
    """Everything learnt, as views of the tensors of an ``AdjacencyMatrix``.

    Attributes:
        vocab_size: V.
        pairs: P, 0 without rows of pairs.
        triples: T, 0 without rows of triples.
        candidates: int32 [V + P + T, k], best first, ``NO_TOKEN`` where there is none: the rows of
            tokens, pairs and triples.
        probabilities: uint16 [V + P + T, k], the bits of float16 values.
        keys: int64 [P + T], the pair or triple of each slot.
        evidence: float32 [2, f], hits and trials per feature (see ``features``).
        weights: float64 [SETS + PATTERNS, INPUTS], of the mixture (see ``gather``).
        rates: float64 [f], expected rates per feature before any evidence.
        logits: float64 [f], log odds of the calibrated rates; computed from the evidence.
    """

    vocab_size: int
    pairs: int
    triples: int
    candidates: Array
    probabilities: Array
    keys: Array
    evidence: Array
    weights: Array
    rates: Array
    logits: Array


class RootArrays(NamedTuple):
    """What may follow the root of each of B rows (see ``remember``).

    Attributes:
        candidates: int32 [B, k - 1], best first, padded with ``NO_TOKEN``.
        probabilities: uint16 [B, k - 1], the bits of float16 values.
        rejected: bool [B], True if rejected nodes are among its sources.
    """

    candidates: Array
    probabilities: Array
    rejected: Array


class Drafts(NamedTuple):
    """The drafts of B rows, as arrays of a ``DraftTree``.

    Attributes:
        tokens: int64 [B, n].
        parents: int64 [B, n].
        depths: int64 [B, n].
        ancestors: bool [B, n, n].
        valid: bool [B, n].
        scores: float32 [B, n].
    """

    tokens: Array
    parents: Array
    depths: Array
    ancestors: Array
    valid: Array
    scores: Array


# float16 values up to 1 by their bits
HALVES = np.arange(0x3C01, dtype=np.uint16).view(np.float16).astype(np.float64)
_inside = np.clip(HALVES, 1e-6, 1 - 1e-4)
BIN_OF = np.clip(np.round(2 * (np.log(_inside / (1 - _inside)) + 9)), 0, BINS - 1).astype(np.int64)


# Rows


@compiled
def to_half(p: float) -> int:
    """Return the bits of the float16 value nearest to ``p``, 0 <= p <= 1."""
    if p < 2.0**-14:
        return int(p * 2.0**24 + 0.5)
    mantissa, exponent = math.frexp(p)  # 0.5 <= mantissa < 1
    return ((exponent + 13) << 10) + int((mantissa * 2.0 - 1.0) * 1024.0 + 0.5) + 1024


@compiled
def locate(level: int, before: int, last: int, token: int, tables: Tables) -> tuple[int, int]:
    """Return the row and the key of ``token`` at a level; a row of -1 where it has none.

    ``last`` is the token before it and ``before`` the one before that; ``NO_TOKEN``: none.
    """
    if level == 0:
        return token, np.int64(0)
    if last < 0 or (tables.pairs if level == 1 else tables.triples) == 0:
        return np.int64(-1), np.int64(0)
    key = last * tables.vocab_size + token
    if level == 1:
        return tables.vocab_size + key % tables.pairs, key
    if before < 0:
        return np.int64(-1), np.int64(0)
    key += before * tables.vocab_size * tables.vocab_size
    return tables.vocab_size + tables.pairs + key % tables.triples, key


@compiled
def find(level: int, before: int, last: int, token: int, tables: Tables) -> int:
    """Return the row of ``token`` at a level if it holds candidates, else -1."""
    row, key = locate(level, before, last, token, tables)
    if (
        row < 0
        or (level > 0 and tables.keys[row - tables.vocab_size] != key)
        or tables.candidates[row, 0] < 0
    ):
        return -1
    return row


@compiled
def average(ids: Array, p: Array, old_weight: float, row_ids: Array, row_p: Array) -> None:
    """Average new candidates into a row: w · old + (1 - w) · new, the k best of the union.

    With w = 0.4 and k = 2, old (7: 0.5, 3: 0.5) and new (3: 0.9, 4: 0.1) give 0.74 for 3, 0.2 for 7
    and 0.06 for 4, so the row becomes (3: 0.74, 7: 0.2).

    Args:
        ids: int32 [k], unique, best first.
        p: float32 [k].
        old_weight: w; a candidate that only one of the two has counts as 0 in the other.
        row_ids: int32 [k], modified.
        row_p: uint16 [k], modified.
    """
    k = len(row_ids)
    union = np.empty(2 * k, np.int32)
    mixed = np.empty(2 * k, np.float64)
    taken = np.zeros(k, np.bool_)
    n = 0
    for rank in range(k):
        token = row_ids[rank]
        if token < 0:
            break
        value = old_weight * HALVES[row_p[rank]]
        for new in range(k):
            if ids[new] == token:
                value += (1.0 - old_weight) * p[new]
                taken[new] = True
        union[n] = token
        mixed[n] = value
        n += 1
    for new in range(k):
        if not taken[new]:
            union[n] = ids[new]
            mixed[n] = (1.0 - old_weight) * p[new]
            n += 1
    for i in range(1, n):  # stable insertion sort, best first
        token, value = union[i], mixed[i]
        at = i
        while at > 0 and mixed[at - 1] < value:
            union[at] = union[at - 1]
            mixed[at] = mixed[at - 1]
            at -= 1
        union[at] = token
        mixed[at] = value
    for rank in range(min(k, n)):
        row_ids[rank] = union[rank]
        row_p[rank] = to_half(mixed[rank])


@compiled
def store(ids: Array, p: Array, row_ids: Array, row_p: Array) -> None:
    """Replace a row."""
    for rank in range(len(row_ids)):
        row_ids[rank] = ids[rank]
        row_p[rank] = to_half(p[rank])


@compiled
def learn_node(
    before: int, last: int, token: int, ids: Array, p: Array, old_weight: float, tables: Tables
) -> None:
    """Average a node's new candidates into the rows of its token, pair and triple."""
    for level in range(LEVELS):
        row, key = locate(level, before, last, token, tables)
        if row < 0:
            continue
        known = tables.candidates[row, 0] >= 0
        if level > 0:
            known = known and tables.keys[row - tables.vocab_size] == key
            tables.keys[row - tables.vocab_size] = key
        if known and old_weight > 0:
            average(ids, p, old_weight, tables.candidates[row], tables.probabilities[row])
        else:
            store(ids, p, tables.candidates[row], tables.probabilities[row])


# The chain


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
def class_of(value: int, bounds: Array) -> int:
    """Return the index of the last of ``bounds`` (ascending) that is at most ``value``."""
    found = 0
    for i in range(1, len(bounds)):
        if value >= bounds[i]:
            found = i
    return found


# The two tokens before a node's


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


# Candidates and their scores


@compiled
def features(k: int) -> tuple[int, int, int, int, int]:
    """Return the number of features, and the first one of each kind.

    The kinds, in order: candidates in a row, by level, rank and class of the probability;
    candidates that a row lacks, by level and class of the row's best probability; chain tokens, by
    classes of match length and depth; candidates that are not the chain's token, by match length;
    and one for sources that are missing.
    """
    lacking = (LEVELS + 2) * k * BINS
    chain = lacking + (LEVELS + 2) * BINS
    beside = chain + len(RUNS) * len(DEPTHS)
    nothing = beside + len(RUNS)
    return nothing + 1, lacking, chain, beside, nothing


@compiled
def expected_rates(k: int) -> Array:
    """Return the rate at which candidates of each feature are right before any evidence."""
    count, lacking, chain, beside, nothing = features(k)
    rates = np.empty(count)
    for level in range(LEVELS + 2):
        a, b, c = IN_ROW[level]
        low, slope = LACKING[level]
        for bin_ in range(BINS):
            odds = bin_ / 2.0 - 9.0
            for rank in range(k):
                total = a + b * odds + c * math.log2(1.0 + rank)
                rates[(level * k + rank) * BINS + bin_] = 1.0 / (1.0 + math.exp(-total))
            total = low + slope * odds
            rates[lacking + level * BINS + bin_] = 1.0 / (1.0 + math.exp(-total))
    for run in range(len(RUNS)):
        for depth in range(len(DEPTHS)):
            rate = LATER_ON_CHAIN[run] if depth else FIRST_ON_CHAIN[run]
            rates[chain + run * len(DEPTHS) + depth] = rate
        rates[beside + run] = BESIDE_CHAIN[run]
    rates[nothing] = 0.5
    return rates


def initial_weights() -> Array:
    """Return the weights before any evidence, float64 [SETS + PATTERNS, INPUTS].

    The row of the longest context counts most; shorter ones share the rest. The sets of patterns,
    which are added to these, are 0.
    """
    weights = np.zeros((SETS + PATTERNS, INPUTS))
    for rows_there in range(4):
        levels = [0] + [level for level in (1, 2) if rows_there & level]
        for state in range(3):
            which = rows_there * 3 + state
            weights[which, levels] = 0.3
            weights[which, levels[-1]] = 0.7
            weights[which, LEVELS] = 0.5
            weights[which, LEVELS + 1] = 0.3 if rows_there else 0.8
    return weights


@compiled
def refresh_logit(feature: int, tables: Tables) -> None:
    """Compute the log odds of a feature's rate: (hits + 30 · expected) / (trials + 30)."""
    hits = min(tables.evidence[0, feature], tables.evidence[1, feature])
    rate = (hits + PRIOR * tables.rates[feature]) / (tables.evidence[1, feature] + PRIOR)
    rate = min(max(rate, LOWEST), HIGHEST)
    tables.logits[feature] = math.log(rate / (1.0 - rate))


@compiled
def refresh_logits(tables: Tables) -> None:
    """Compute the log odds of every feature."""
    for feature in range(len(tables.rates)):
        refresh_logit(feature, tables)


@compiled
def position(candidate: int, found: Array, count: int) -> int:
    """Return the index of a candidate among the first ``count`` of ``found``, or ``count``."""
    at = 0
    while at < count and found[at] != candidate:
        at += 1
    return at


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
    found: Array,
    kinds: Array,
    odds: Array,
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
        found: int64 [c], c = (LEVELS + 1) · k, gets the candidates.
        kinds: int64 [c, LEVELS + 3], gets their features by source, and their pattern: a bit
            for each source that has the candidate.
        odds: float64 [c], gets the log odds of their scores.

    Returns:
        The number of candidates, the weight set of the node, and the index of the chain's token
        among the candidates, -1 where there is none.
    """
    k = tables.candidates.shape[1]
    _, lacking, chain, beside, nothing = features(k)
    n = 0
    rows_there = 0
    lacks = np.full(LEVELS + 2, nothing)  # by source
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
            lacking,
            lacks,
            n,
            found,
            kinds,
        )
    on_chain = -1
    state = 0
    if below >= 0:
        state = 2 if run >= LONG else 1
        length = class_of(run, RUNS)
        lacks[LEVELS] = beside + length
        for i in range(n):
            kinds[i, LEVELS] = lacks[LEVELS]
        on_chain = position(below, found, n)
        if on_chain == n:
            found[n] = below
            for source in range(LEVELS + 2):
                kinds[n, source] = lacks[source]
            kinds[n, LEVELS + 2] = 0
            n += 1
        kinds[on_chain, LEVELS] = chain + length * len(DEPTHS) + class_of(depth, DEPTHS)
        kinds[on_chain, LEVELS + 2] |= 1 << LEVELS
    if root_row >= 0 and k > 1 and roots.candidates[root_row, 0] >= 0:
        n = add_row(
            REJECTED if roots.rejected[root_row] else RUNNERS_UP,
            LEVELS + 1,
            roots.candidates[root_row],
            roots.probabilities[root_row],
            k,
            lacking,
            lacks,
            n,
            found,
            kinds,
        )
    which = rows_there * 3 + state
    for i in range(n):
        pattern = SETS + kinds[i, LEVELS + 2]
        total = tables.weights[which, INPUTS - 1] + tables.weights[pattern, INPUTS - 1]
        for source in range(LEVELS + 2):
            weight = tables.weights[which, source] + tables.weights[pattern, source]
            total += weight * tables.logits[kinds[i, source]]
        odds[i] = min(MOST, max(LEAST, total))
    return n, which, on_chain


@compiled
def add_row(
    level: int,
    source: int,
    candidates: Array,
    probabilities: Array,
    k: int,
    lacking: int,
    lacks: Array,
    n: int,
    found: Array,
    kinds: Array,
) -> int:
    """Unite the candidates of a row with those found so far (see ``gather``).

    Args:
        level: of the row, which its features depend on.
        source: column of ``kinds``.
        candidates: int32 [≤ k], best first, padded with ``NO_TOKEN``.
        probabilities: uint16, of the same size.
        k: of the matrix.
        lacking: see ``features``.
        lacks: int64 [LEVELS + 2], the features of a candidate that no source has, modified.
        n: number of candidates found so far.
        found: int64 [c], modified.
        kinds: int64 [c, LEVELS + 3], modified.

    Returns:
        The number of candidates.
    """
    lacks[source] = lacking + level * BINS + BIN_OF[probabilities[0]]
    for i in range(n):
        kinds[i, source] = lacks[source]
    others = n
    for rank in range(len(candidates)):
        candidate = candidates[rank]
        if candidate < 0:
            break
        at = position(candidate, found, others)
        if at == others:
            at = n
            found[at] = candidate
            for other in range(LEVELS + 2):
                kinds[at, other] = lacks[other]
            kinds[at, LEVELS + 2] = 0
            n += 1
        kinds[at, source] = (level * k + rank) * BINS + BIN_OF[probabilities[rank]]
        kinds[at, LEVELS + 2] |= 1 << source
    return n


# Propose


@compiled
def grow(
    row: int,
    context: Array,
    length: int,
    chain: Array,
    count: int,
    run: int,
    roots: RootArrays,
    tables: Tables,
    max_depth: int,
    drafts: Drafts,
) -> None:
    """Grow the tree of one row best-first; a node's score is the product along its path.

    Pending candidates are kept sorted, and only as many as nodes are still missing. On equal
    scores the one that was found first wins. If the root's candidates are A with 0.6 and B with
    0.3, and A's are C with 0.7 and D with 0.2, the nodes are A (0.6), C (0.42), B (0.3), D (0.12).

    Args:
        row: its index in ``drafts``.
        context: int64 [≥ length], the last token is the root.
        length: number of tokens, at least 1.
        chain: int64, from ``match``.
        count: valid tokens of ``chain``.
        run: length of the match.
        roots: the root rows.
        tables: what has been learnt.
        max_depth: of the tree.
        drafts: gets the tree.
    """
    tokens, parents, depths = drafts.tokens[row], drafts.parents[row], drafts.depths[row]
    ancestors, valid, scores = drafts.ancestors[row], drafts.valid[row], drafts.scores[row]
    n, k = len(tokens), tables.candidates.shape[1]
    found = np.empty((LEVELS + 1) * k, np.int64)
    kinds = np.empty(((LEVELS + 1) * k, LEVELS + 3), np.int64)
    odds = np.empty((LEVELS + 1) * k)
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
            if 0 <= on_chain[node] < count:
                below = chain[on_chain[node]]
            many, _, follows = gather(
                before,
                last,
                tokens[node],
                below,
                run,
                on_chain[node],
                row if node == 0 else -1,
                roots,
                tables,
                found,
                kinds,
                odds,
            )
            missing = n - grown
            for i in range(many):
                least = FLOOR
                if end - begin == missing and worth[end - 1] > least:
                    least = worth[end - 1]
                # log sigmoid(x) is below min(x, 0), which costs no logarithm.
                if logs[node] + min(odds[i], 0.0) <= least:
                    continue
                value = logs[node] - math.log1p(math.exp(-odds[i]))
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
                pending[at, 0] = found[i]
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
def propose(
    context: Array,
    lengths: Array,
    roots: Array,
    chain: Array,
    counts: Array,
    runs: Array,
    root_rows: RootArrays,
    tables: Tables,
    max_depth: int,
    drafts: Drafts,
) -> None:
    """Append the roots, search the chain of every row and grow its tree (see ``grow``).

    Args:
        context: int64 [B, w], modified.
        lengths: int64 [B], modified.
        roots: int64 [B]; in a full row, the root replaces the last token.
        chain: int64 [B, c], gets the chains.
        counts: int64 [B], gets their lengths.
        runs: int64 [B], gets the lengths of the matches.
        root_rows: of the roots (see ``remember``).
        tables: what has been learnt.
        max_depth: of a tree.
        drafts: gets the trees.
    """
    append_roots(context, lengths, roots)
    for row in range(len(lengths)):
        runs[row], counts[row] = match(context[row], lengths[row], WINDOW, chain[row])
        grow(
            row,
            context[row],
            lengths[row],
            chain[row],
            counts[row],
            runs[row],
            root_rows,
            tables,
            max_depth,
            drafts,
        )


# Observe


@compiled
def count(
    row: int,
    context: Array,
    length: int,
    chain: Array,
    chained: int,
    run: int,
    roots: RootArrays,
    emitted: Array,
    tables: Tables,
    learning_rate: float,
) -> None:
    """Compare the candidates along the emitted tokens of one row with these tokens.

    Counts hits and trials per feature, and moves the weights along the gradient of the log
    likelihood: w += rate · (hit - score) · log odds of the source (Mahoney, as in ``gather``).
    Candidates count whether or not they were drafted.

    Args:
        row: its index in ``roots``.
        context: int64 [≥ length], the last token is the root.
        length: number of tokens.
        chain: int64, from ``match``.
        chained: valid tokens of ``chain``.
        run: length of the match.
        roots: the root rows.
        emitted: int64 [t], padded with ``NO_TOKEN``.
        tables: what has been learnt.
        learning_rate: of the weights.
    """
    k = tables.candidates.shape[1]
    nothing = len(tables.rates) - 1
    found = np.empty((LEVELS + 1) * k, np.int64)
    kinds = np.empty(((LEVELS + 1) * k, LEVELS + 3), np.int64)
    odds = np.empty((LEVELS + 1) * k)
    step = np.empty(INPUTS)
    token = context[length - 1]
    before, last = ending(context, length)
    on_chain = True
    for depth in range(len(emitted)):
        truth = emitted[depth]
        if truth < 0:
            break
        below = chain[depth] if on_chain and depth < chained else NO_CHAIN
        many, which, _ = gather(
            before,
            last,
            token,
            below,
            run,
            depth,
            row if depth == 0 else -1,
            roots,
            tables,
            found,
            kinds,
            odds,
        )
        step[:] = 0.0
        for i in range(many):
            error = -1.0 / (1.0 + math.exp(-odds[i]))
            if found[i] == truth:
                error += 1.0
            pattern = SETS + kinds[i, LEVELS + 2]
            for source in range(LEVELS + 2):
                slope = error * tables.logits[kinds[i, source]]
                step[source] += slope
                tables.weights[pattern, source] += learning_rate * PATTERN_RATE * slope
            step[INPUTS - 1] += error
            tables.weights[pattern, INPUTS - 1] += learning_rate * PATTERN_RATE * error
        for source in range(INPUTS):
            tables.weights[which, source] += learning_rate * step[source]
        for i in range(many):
            for source in range(LEVELS + 2):
                feature = kinds[i, source]
                if feature == nothing:
                    continue
                tables.evidence[1, feature] += 1
                if found[i] == truth:
                    tables.evidence[0, feature] += 1
        for i in range(many):
            for source in range(LEVELS + 2):
                if kinds[i, source] != nothing:
                    refresh_logit(kinds[i, source], tables)
        on_chain = on_chain and below == truth
        before, last, token = last, token, truth


@compiled
def observe(
    context: Array,
    lengths: Array,
    chain: Array,
    counts: Array,
    runs: Array,
    root_rows: RootArrays,
    tokens: Array,
    parents: Array,
    valid: Array,
    ids: Array,
    p: Array,
    finite: Array,
    emitted: Array,
    tables: Tables,
    old_weight: float,
    learning_rate: float,
) -> None:
    """Count along the emitted tokens, average the rows of all nodes, and extend the context.

    All rows of the batch are counted before any is learnt from.

    Args:
        context: int64 [B, w], the last token of each row is the root; gets the emitted tokens
            except for the last one, which is the next root.
        lengths: int64 [B], modified.
        chain: int64 [B, c].
        counts: int64 [B], -1 where no draft was grown, so that nothing is counted.
        runs: int64 [B].
        root_rows: modified.
        tokens: int64 [B, n], the draft.
        parents: int64 [B, n].
        valid: bool [B, n]; a row whose root is invalid has ended.
        ids: int32 [B, n, k], the target's best candidates at every node.
        p: float32 [B, n, k].
        finite: bool [B, n], False where these must not be learnt.
        emitted: int64 [B, t], padded with ``NO_TOKEN``.
        tables: what has been learnt.
        old_weight: see ``average``.
        learning_rate: of the weights; negative: nothing is counted.
    """
    for row in range(len(lengths)):
        length = lengths[row]
        if not valid[row, 0]:
            continue
        if counts[row] >= 0 and learning_rate >= 0:
            count(
                row,
                context[row],
                length,
                chain[row],
                counts[row],
                runs[row],
                root_rows,
                emitted[row],
                tables,
                learning_rate,
            )
    for row in range(len(lengths)):
        second, first = ending(context[row], lengths[row])
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
        root_rows.rejected[row] = remember(
            tokens[row],
            parents[row],
            valid[row],
            ids[row],
            p[row],
            finite[row],
            emitted[row],
            root_rows.candidates[row],
            root_rows.probabilities[row],
            root_rows.rejected[row],
        )
    append_emitted(context, lengths, emitted)


@compiled
def remember(
    tokens: Array,
    parents: Array,
    valid: Array,
    ids: Array,
    p: Array,
    finite: Array,
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
        tokens: int64 [n], the draft.
        parents: int64 [n].
        valid: bool [n]; a row whose root is invalid has ended.
        ids: int32 [n, k], the target's best candidates at every node.
        p: float32 [n, k].
        finite: bool [n], False where these must not be used.
        emitted: int64 [t], padded with ``NO_TOKEN``; the last one is the next root.
        candidates: int32 [k - 1], gets the row's candidates, padded with ``NO_TOKEN``.
        probabilities: uint16 [k - 1], gets the bits of their float16 probabilities.
        before: result of the last call for this row.

    Returns:
        True if the row has rejected children among its sources; ``before`` if it has ended.
    """
    if not valid[0] or emitted[0] < 0:
        return before
    last = 0  # node after which the last token was chosen
    depth = 0
    while depth + 1 < len(emitted) and emitted[depth + 1] >= 0:
        below = -1
        for node in range(len(tokens) - 1, last, -1):
            if valid[node] and parents[node] == last and tokens[node] == emitted[depth]:
                below = node
        if below < 0:
            break
        last = below
        depth += 1
    candidates[:] = NO_TOKEN
    probabilities[:] = 0
    if not finite[last]:
        return False
    k = ids.shape[1]
    siblings = np.empty(SIBLINGS, np.int64)
    count = 0
    for node in range(last + 1, len(tokens)):
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
        if ids[last, rank] != emitted[depth]:
            lost += p[last, rank]
    share = RUNNERS_SHARE if count > 0 else 1.0
    for rank in range(k):
        if ids[last, rank] != emitted[depth]:
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
def append_emitted(context: Array, lengths: Array, emitted: Array) -> None:
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


# Branches


@compiled
def likeliest(
    parents: Array, valid: Array, tokens: Array, scores: Array, chain: Array, chances: Array
) -> None:
    """Follow the first child, the most likely one, from each root down.

    Args:
        parents: int64 [B, n], nodes in descending order of their scores.
        valid: bool [B, n].
        tokens: int64 [B, n].
        scores: float32 [B, n].
        chain: int64 [B, m], gets the tokens of the branch, padded with ``NO_TOKEN``.
        chances: float32 [B, m], gets their scores, padded with 0.
    """
    chain[:] = NO_TOKEN
    chances[:] = 0
    for row in range(len(parents)):
        last, count = 0, 1
        chain[row, 0], chances[row, 0] = tokens[row, 0], scores[row, 0]
        for node in range(1, parents.shape[1]):
            if count == chain.shape[1]:
                break
            if valid[row, node] and parents[row, node] == last:
                chain[row, count], chances[row, count] = tokens[row, node], scores[row, node]
                last = node
                count += 1

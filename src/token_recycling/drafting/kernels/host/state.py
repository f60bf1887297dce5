"""The arrays that the kernels on the host read and write.

Shapes use B sequences, n nodes, k candidates, V tokens in the vocabulary, P slots for pairs and T
for triples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LEVELS = 3  # rows of the token, of the pair that ends with it, and of the triple
# Sources of candidates: the rows by level, the chain, the root row
CHAIN, ROOT_ROW = LEVELS, LEVELS + 1
SOURCES = LEVELS + 2
# Kinds of rows: by level, and a root row from the runners-up alone, or from rejected nodes too
RUNNERS_UP, REJECTED = LEVELS, LEVELS + 1
ROW_KINDS = LEVELS + 2
PATTERN = SOURCES  # column behind those of the sources: a bit for each source of a candidate
CONSTANT = SOURCES  # input of the mixture behind the sources
INPUTS = SOURCES + 1
SETS = 12  # weight sets of a node: pair row or not, triple row or not, chain state
PATTERNS = 2**SOURCES  # weight sets of a candidate, by the sources that have it
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
        evidence: float32 [2, f], hits and trials per feature (see ``feature_offsets``).
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


class State(NamedTuple):
    """What the drafter keeps of each of B rows; the kernels modify it.

    Attributes:
        context: int64 [B, w], the tokens so far.
        lengths: int64 [B], of these.
        chains: int64 [B, c], what followed the longest match of the context's end (see ``match``).
        chain_lengths: int64 [B]; -1 where no draft was grown.
        match_lengths: int64 [B], of the longest match.
        roots: what may follow the root.
    """

    context: Array
    lengths: Array
    chains: Array
    chain_lengths: Array
    match_lengths: Array
    roots: RootArrays

    def part(self, rows: slice) -> State:
        """Return views of some of the rows."""
        return State(
            self.context[rows],
            self.lengths[rows],
            self.chains[rows],
            self.chain_lengths[rows],
            self.match_lengths[rows],
            RootArrays(*(array[rows] for array in self.roots)),
        )


class Verified(NamedTuple):
    """A verified draft of B rows, and what the target says of it.

    Attributes:
        tokens: int64 [B, n], the draft.
        parents: int64 [B, n].
        valid: bool [B, n]; a row whose root is invalid has ended.
        ids: int64 [B, n, k], the target's best candidates at every node.
        p: float32 [B, n, k].
        finite: bool [B, n], False where these must not be learnt.
        path: int64 [B, t], the accepted nodes, after which the emitted tokens were chosen; padded
            with 0 from where these leave the draft.
        emitted: int64 [B, t], padded with ``NO_TOKEN``; the last one is the next root.
    """

    tokens: Array
    parents: Array
    valid: Array
    ids: Array
    p: Array
    finite: Array
    path: Array
    emitted: Array


class Gathered(NamedTuple):
    """What ``gather`` writes to, for c = (LEVELS + 1) · k candidates.

    Attributes:
        candidates: int64 [c].
        features: int64 [c, SOURCES + 1], by source, and the candidate's pattern.
        odds: float64 [c], log odds of their scores.
    """

    candidates: Array
    features: Array
    odds: Array


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

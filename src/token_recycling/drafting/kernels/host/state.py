"""The arrays that the kernels on the host read and write.

Shapes use B sequences, n nodes, k candidates, V tokens in the vocabulary, P slots for pairs and T
for triples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

LEVELS = 3  # rows of the token, of the pair that ends with it, and of the triple
# Levels of the root row, if it comes from the runners-up alone, or from rejected nodes too
RUNNERS_UP, REJECTED = LEVELS, LEVELS + 1
INPUTS = LEVELS + 3  # of the mixture: one per level, the chain, the root row, and a constant
SETS = 12  # weight sets of a node: pair row or not, triple row or not, chain state
# Weight sets of a candidate, by the sources that have it: the rows by level, chain, root row
PATTERNS = 32
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

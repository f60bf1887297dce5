"""What the kernels of a GPU read and write: tensors of fixed addresses, in groups."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Texts(NamedTuple):
    """The texts of B rows of a batch and their chains from the context.

    Attributes:
        context: int64 [B, w], the tokens so far.
        lengths: int64 [B], of these.
        chains: int64 [B, c], what followed the longest earlier match of the text's end.
        chain_lengths: int64 [B].
        match_lengths: int64 [B], of the longest match.
    """

    context: Tensor
    lengths: Tensor
    chains: Tensor
    chain_lengths: Tensor
    match_lengths: Tensor


class RootCandidates(NamedTuple):
    """What the last step has found for the next root, besides the tables.

    Attributes:
        candidates: int32 [B, k - 1].
        probabilities: int16 [B, k - 1], the bits of float16.
        rejected: bool [B], whether nodes below the last accepted one were rejected.
    """

    candidates: Tensor
    probabilities: Tensor
    rejected: Tensor


class DeviceTables(NamedTuple):
    """The adjacency matrix for one, two and three tokens, and the weights of its candidates.

    Attributes:
        candidates: int32 [V + P + T, k].
        probabilities: int16 [V + P + T, k], the bits of float16.
        keys: int64 [P + T], the tokens of an entry; ``NO_KEY`` if it is empty.
        weights: float32 [SETS + PATTERNS, INPUTS], of the mixture of sources.
        logits: float32 [f], log odds of the calibrated rates.
        classes: int32, classes of probabilities.
        vocab_size: V.
        pairs: P, entries for two tokens.
        triples: T, entries for three tokens.
    """

    candidates: Tensor
    probabilities: Tensor
    keys: Tensor
    weights: Tensor
    logits: Tensor
    classes: Tensor
    vocab_size: int
    pairs: int
    triples: int

    @property
    def k(self) -> int:
        """Candidates per entry."""
        return int(self.candidates.shape[1])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """V, P and T."""
        return self.vocab_size, self.pairs, self.triples


class Evidence(NamedTuple):
    """What calibration and mixture are learnt from.

    Attributes:
        counts: float32 [2, f], hits and trials per feature, from which the log odds follow.
        weights: float64, of which ``DeviceTables.weights`` is a copy.
        rates: float32 [f], expected before any evidence.
    """

    counts: Tensor
    weights: Tensor
    rates: Tensor

"""What the kernels of a GPU read and write: tensors of fixed addresses, in groups."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Texts(NamedTuple):
    """The texts of B rows of a batch and their chains from the context.

    Attributes:
        tokens: int64 [B, w].
        lengths: int64 [B], tokens of each text.
        chain: int64 [B, c], what followed the longest earlier match of the text's end.
        counts: int64 [B], tokens of the chain.
        runs: int64 [B], tokens of the match.
    """

    tokens: Tensor
    lengths: Tensor
    chain: Tensor
    counts: Tensor
    runs: Tensor


class RootCandidates(NamedTuple):
    """What the last step has found for the next root, besides the tables.

    Attributes:
        ids: int32 [B, k - 1].
        probabilities: int16 [B, k - 1], the bits of float16.
        rejected: bool [B], whether nodes below the last accepted one were rejected.
    """

    ids: Tensor
    probabilities: Tensor
    rejected: Tensor


class DeviceTables(NamedTuple):
    """The adjacency matrix for one, two and three tokens, and the weights of its candidates.

    Attributes:
        candidates: int32 [V + P + T, k].
        probabilities: int16 [V + P + T, k], the bits of float16.
        keys: int64 [P + T], the tokens of a line; 0 if it is empty.
        weights: float32, log odds by features.
        logits: float32, log odds of the expected rates.
        classes: int32, classes of probabilities.
        vocab_size: V.
        pairs: P, lines for two tokens.
        triples: T, lines for three tokens.
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
        """Candidates per line."""
        return int(self.candidates.shape[1])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """V, P and T."""
        return self.vocab_size, self.pairs, self.triples


class Evidence(NamedTuple):
    """Counts of candidates that came, from which the weights follow.

    Attributes:
        counts: float32.
        weights: float64, of which ``DeviceTables.weights`` is a copy.
        rates: float32, expected rates.
    """

    counts: Tensor
    weights: Tensor
    rates: Tensor

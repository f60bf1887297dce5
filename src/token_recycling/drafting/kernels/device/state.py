"""What the kernels of a GPU read and write: tensors of fixed addresses, in groups.

``State`` and ``RootArrays`` are those of the host, for S states, with two differences: a context
may be int32, and probabilities are int16.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DeviceTables(NamedTuple):
    """Everything learnt, as in the host's ``Tables``, and copies for fast reading.

    Attributes:
        candidates: int32 [V + P + T, k].
        probabilities: int16 [V + P + T, k], the bits of float16.
        keys: int64 [P + T], the pair or triple of each slot.
        evidence: float32 [2, f], hits and trials per feature.
        weights: float64 [SETS + PATTERNS, INPUTS], of the mixture of sources.
        rates: float32 [f], expected before any evidence.
        logits: float32 [f], log odds of the calibrated rates.
        rounded: float32, a copy of ``weights``, by which scores are computed.
        classes: int32, classes of probabilities by their bits.
    """

    candidates: Tensor
    probabilities: Tensor
    keys: Tensor
    evidence: Tensor
    weights: Tensor
    rates: Tensor
    logits: Tensor
    rounded: Tensor
    classes: Tensor


class DeviceDraft(NamedTuple):
    """The last draft of S states, as in ``DraftTree``, and what its nodes teach.

    Attributes:
        tokens: int64 [S, n].
        parents: int64 [S, n].
        depths: int64 [S, n].
        ancestors: bool [S, n, n].
        valid: bool [S, n].
        scores: float32 [S, n].
        entries: int64 [S, n, 3], the entries of the tables that each node teaches; -1: none.
        keys: int64 [S, n, 3], their keys.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    valid: Tensor
    scores: Tensor
    entries: Tensor
    keys: Tensor

    @property
    def size(self) -> int:
        """Nodes of a draft, root included."""
        return int(self.tokens.shape[1])

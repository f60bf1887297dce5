"""The best tokens of logits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skinny_kernels.compiled import as_array, compiled, in_threads

THREAD_LOGITS = 2**19  # logits from which a thread of its own is faster
BLOCK = 64  # logits whose maximum is computed at once, with vector instructions
LOWEST = np.int32(-(2**31))  # below the code of every float32 value
SIGN, MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)  # the sign's position; the other bits
INFINITY, NAN = np.int32(0x7F800000), np.int32(0x7FFFFFFF)


@compiled
def _code(bits: Any) -> Any:
    """Return an int32 that orders like the float32 value with these bits; NaN is the largest.

    Integers are compared because the compiler does not vectorize the maximum of floats.
    """
    sign = bits >> SIGN
    magnitude = bits & MAGNITUDE
    return np.int32(NAN) if magnitude > INFINITY else np.int32((magnitude ^ sign) - sign)


@compiled
def _largest(bits: Any) -> Any:
    largest = LOWEST
    for i in range(len(bits)):
        largest = max(largest, _code(bits[i]))
    return largest


@compiled
def _insert(code: Any, index: int, filled: int, codes: Any, ids: Any) -> None:
    """Insert into a descending list of ``filled`` of at most k codes, behind equal ones."""
    at = min(filled, len(codes) - 1)
    while at > 0 and codes[at - 1] < code:
        codes[at] = codes[at - 1]
        ids[at] = ids[at - 1]
        at -= 1
    codes[at] = code
    ids[at] = index


@compiled
def _rank_row(bits: Any, maxima: Any, codes: Any, ids: Any) -> None:
    """Find the k largest values of a row; of equal ones the first.

    The k-th largest maximum of all blocks is a lower bound of the k-th largest value, so that only
    few blocks need to be searched.

    Args:
        bits: int32 [V], the bits of float32 values.
        maxima: int32 [ceil(V / BLOCK)], overwritten.
        codes: int32 [k], gets the codes of the values, in descending order.
        ids: int64 [k], gets their indices.
    """
    k = len(ids)
    filled = 0
    for block in range(len(maxima)):
        largest = _largest(bits[block * BLOCK : block * BLOCK + BLOCK])
        maxima[block] = largest
        if filled < k or largest > codes[k - 1]:
            _insert(largest, block, filled, codes, ids)
            filled = min(filled + 1, k)
    bound = codes[k - 1] if filled == k else LOWEST
    filled = 0
    for block in range(len(maxima)):
        if maxima[block] < bound:
            continue
        for i in range(block * BLOCK, min(block * BLOCK + BLOCK, len(bits))):
            code = _code(bits[i])
            if code >= bound and (filled < k or code > codes[k - 1]):
                _insert(code, i, filled, codes, ids)
                filled = min(filled + 1, k)


@compiled
def _rank(bits: Any, codes: Any, ids: Any) -> None:
    """Call ``_rank_row`` for every row of ``bits`` [n, V], ``codes`` [n, k] and ``ids`` [n, k]."""
    maxima = np.empty((bits.shape[1] + BLOCK - 1) // BLOCK, np.int32)
    for row in range(len(bits)):
        _rank_row(bits[row], maxima, codes[row], ids[row])


@compiled
def _softmax(logits: Any, ids: Any, p: Any, finite: Any) -> None:
    """Compute the softmax over the chosen values of every row.

    Args:
        logits: float32 [n, V].
        ids: int64 [n, k], the largest value first.
        p: float32 [n, k], gets the softmax.
        finite: bool [n], gets False where it is not finite.
    """
    for row in range(len(ids)):
        largest = logits[row, ids[row, 0]]
        finite[row] = np.isfinite(largest)
        total = 0.0
        for i in range(ids.shape[1]):
            p[row, i] = math.exp(logits[row, ids[row, i]] - largest)
            total += p[row, i]
        for i in range(ids.shape[1]):
            p[row, i] /= total


def _rows(logits: Tensor) -> Any:
    """Return logits [..., V] on the CPU as an array float32 [n, V]."""
    return as_array(logits.detach().float()).reshape(-1, logits.shape[-1])


def _ids(rows: Any, k: int) -> Any:
    """Return the indices int64 [n, k] of the largest values of float32 rows [n, V]."""
    ids, codes = np.empty((len(rows), k), np.int64), np.empty((len(rows), k), np.int32)
    bits = rows.view(np.int32)
    least = THREAD_LOGITS // max(rows.shape[1], 1)
    in_threads(len(rows), least, lambda part: _rank(bits[part], codes[part], ids[part]))
    return ids


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits, in descending order, and their tokens.

    Args:
        logits: [..., V], of any floating dtype.
        k: at most V.

    Returns:
        float32 [..., k] and int64 [..., k], on the device of the logits. NaN counts as largest.
    """
    if logits.device.type != "cpu":
        values, ids = logits.topk(k, dim=-1)
        return values.float(), ids
    rows, shape = _rows(logits), (*logits.shape[:-1], k)
    top_ids = _ids(rows, k)
    chosen = np.take_along_axis(rows, top_ids, axis=1)
    return torch.from_numpy(chosen).view(shape), torch.from_numpy(top_ids).view(shape)


def argmax(logits: Tensor) -> Tensor:
    """Return the token of the largest logit, the first one on a tie, int64 [...].

    Args:
        logits: [..., V], of any floating dtype.
    """
    if logits.device.type != "cpu":
        return logits.max(dim=-1).indices  # takes a third of argmax's time in bfloat16
    return torch.from_numpy(_ids(_rows(logits), 1)).view(logits.shape[:-1])


class Candidates(NamedTuple):
    """The k best tokens after each node, as arrays on the host.

    Attributes:
        ids: int64 [..., k], best first.
        probabilities: float32 [..., k], their softmax over these k tokens: one over the whole
            vocabulary would cost more than it gains.
        finite: bool [...], False where the logits have overflowed.
    """

    ids: Any
    probabilities: Any
    finite: Any

    @property
    def best(self) -> Any:
        """The best token after each node, int64 [...]; None if k is 0."""
        return np.ascontiguousarray(self.ids[..., 0]) if self.ids.shape[-1] else None

    def at(self, index: Any) -> Candidates:
        """Return the candidates at ``index`` of the leading dimensions."""
        return Candidates(self.ids[index], self.probabilities[index], self.finite[index])


def best_candidates(logits: Tensor, k: int) -> Candidates:
    """Return the k best tokens after each node.

    Args:
        logits: [..., V], on any device.
        k: at most V; 0: nothing is computed, and the arrays are empty.
    """
    shape = logits.shape[:-1]
    if not k:
        ids, p = np.empty((*shape, 0), np.int64), np.empty((*shape, 0), np.float32)
        return Candidates(ids, p, np.ones(shape, np.bool_))
    if logits.device.type == "cpu":
        rows = _rows(logits)
        ids = _ids(rows, k)
        p, finite = np.empty(ids.shape, np.float32), np.empty(len(ids), np.bool_)
        _softmax(rows, ids, p, finite)
        return Candidates(ids.reshape(*shape, k), p.reshape(*shape, k), finite.reshape(shape))
    values, tokens = top_k(logits, k)
    # One transfer for both; float64 holds every token and every float32 value.
    both = torch.stack([tokens.double(), values.softmax(dim=-1).double()]).cpu().numpy()
    p = both[1].astype(np.float32)
    return Candidates(both[0].astype(np.int64), p, np.isfinite(p).all(axis=-1))

"""The best tokens of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from token_recycling.compiled import as_array, compiled

BLOCK = 64  # logits whose maximum is computed at once, with vector instructions
LOWEST = np.int32(-(2**31))  # below the code of every float32 value
SIGN, MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)


@compiled
def _code(bits: Any) -> Any:
    """Return an int32 that orders like the float32 value with these bits, other than NaN.

    Integers are compared because the compiler does not vectorize the maximum of floats.
    """
    sign = bits >> SIGN
    return np.int32(((bits & MAGNITUDE) ^ sign) - sign)


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


def _on_host(logits: Tensor, k: int) -> np.ndarray[Any, Any]:
    """Return the indices of the k largest values of float32 logits [n, V] on the CPU."""
    bits = as_array(logits.detach()).view(np.int32)
    ids = np.empty((len(bits), k), np.int64)
    _rank(bits, np.empty((len(bits), k), np.int32), ids)
    return ids


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits, in descending order, and their tokens.

    Args:
        logits: [..., V], of any floating dtype.
        k: at most V.

    Returns:
        float32 [..., k] and int64 [..., k], on the device of the logits. The order of NaN is
        undefined.
    """
    if logits.device.type != "cpu":
        values, ids = logits.topk(k, dim=-1)
        return values.float(), ids
    logits = logits.float()
    rows = logits.reshape(-1, logits.shape[-1])
    ids = torch.from_numpy(_on_host(rows, k))
    shape = (*logits.shape[:-1], k)
    return rows.gather(1, ids).view(shape), ids.view(shape)

"""Entries of the matrix: look-up, averaging, and what is written after a step."""

from __future__ import annotations

import math

import numpy as np

from skinny_kernels.compiled import compiled
from token_recycling.drafting.kernels.host.rates import HALVES
from token_recycling.drafting.kernels.host.state import LEVELS, Array, Tables

TINY = 1e-9  # least sum of probabilities that is divided by


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
        ids: int64 [k], unique, best first.
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

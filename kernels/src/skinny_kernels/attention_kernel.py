"""The kernel of ``attention``: softmax(Q K^T + mask) V of few queries, compiled for this processor.

All queries that attend with the same head of keys (of every token, and of every head of the group)
are rows of one small matrix, and a vector holds the same number of consecutive rows: scores are
[keys, rows], and so is everything else, so that softmax needs no sum across a vector's lanes and
the keys and values are read as they lie in memory. Both products are sums of a number of a key or
value, repeated in a vector, times a vector of the other matrix.

The keys of a row of the batch are its committed ones, and those of the queries' own tokens, which
are in the last slots; the slots between are skipped. They are divided into blocks of ``KEYS``, but
the queries' own belong to one block, where the first of them begins: so a node of a draft adds up
the keys of its path in the same order and blocks as it does in a step of its own, if its position
is in that block (see ``attention.deepest``). Keys that are masked add 0. A block has its own
maximum and sum, as in flash decoding (Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html), and the thread that finishes a head's last
block combines them, in their order. So the result depends on neither the number of threads nor the
other rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from skinny_kernels.atomics import fetch_add
from skinny_kernels.attention_vectors import (
    BARE,
    CAPPED,
    MASKED,
    MOST_VECTORS,
    Matrix,
    product,
    softmax,
    weighted,
)
from skinny_kernels.intrinsics import (
    address_of,
    buffer_of,
    convert,
    copy_bytes,
    get,
    lanes,
    read_float,
    word_at,
    write_number,
)
from skinny_kernels.team_kernel import claim
from skinny_kernels.vectors import BYTES, FLOAT32

KEYS = 128  # keys in a block
MOST_TOKENS = 128  # whose keys the last block has too
MOST_SIZE = 256  # numbers in a key or a value
PART = 2**15  # bytes of what the queries attend to in a block, up to which they are buffered
PART_FLOATS = PART // 4
# Numbers in a thread's buffers: scores of a block; its keys or values as float32.
SCORES, FLOATS = (KEYS + MOST_TOKENS) * MOST_VECTORS * 16, (KEYS + MOST_TOKENS) * MOST_SIZE

# Numbers that a thread is given, all int64; the first are addresses, those of strides are in bytes.
(
    QUERIES,  # float32 [batch, heads, size, width]
    KEY,  # [batch, heads, slots, size]
    VALUE,  # [batch, heads, slots, value size]
    MASK,  # float32 [batch, slots, width], those of a row without the slots that are skipped
    PARTS,  # float32 [batch, heads, blocks, 2 + value size, width]: sum, maximum, weighted values
    OUT,  # [batch, tokens, heads, group, value size]
    SCALE,  # float32, twice: of the scores, and what they are capped by; 0: they are not
    BATCH,
    HEADS,
    SLOTS,
    SIZE,
    VALUE_SIZE,
    TOKENS,
    GROUP,
    WIDTH,  # group * tokens, rounded up to whole vectors
    KEY_BATCH,  # strides
    KEY_HEAD,
    KEY_SLOT,
    VALUE_BATCH,
    VALUE_HEAD,
    VALUE_SLOT,
    MASK_BATCH,
    COMMITTED,  # address of int64 [batch], keys before those of the queries' own tokens
    FINISHED,  # of each head, how many of its blocks are finished
) = range(24)


def blocks_of(slots: int, tokens: int) -> int:
    """Return the blocks of a row without slots that are skipped: the most that a row has."""
    return (slots - tokens) // KEYS + 1


@numba.njit(error_model="numpy")
def _float_rows(
    dtype: Any,
    source: Any,
    stride: Any,
    first: Any,
    skipped: Any,
    count: Any,
    size: Any,
    buffer: Any,
) -> tuple[Any, Any]:
    """Return address and stride of ``count`` rows of ``size`` numbers as float32.

    After the first ``first`` of them, ``skipped`` rows are left out.
    """
    if dtype == FLOAT32 and (count <= first or not skipped):
        return source, stride
    for n in range(count):
        row = n if n < first else n + skipped
        convert(dtype, FLOAT32, source + row * stride, buffer + 4 * n * size, size)
    return buffer, 4 * size


@numba.njit(error_model="numpy")
def _combine(fields: Any, head: Any, blocks: Any, dtype: Any) -> None:
    """Add up the first ``blocks`` blocks of a head, and write what its queries attend to."""
    numba.literally(dtype)
    heads, tokens, group, width = (
        get(fields, HEADS),
        get(fields, TOKENS),
        get(fields, GROUP),
        get(fields, WIDTH),
    )
    value_size = get(fields, VALUE_SIZE)
    row, lane_bytes = 4 * width, 4 * lanes()
    part = (value_size + 2) * row
    parts = get(fields, PARTS) + head * _blocks(fields) * part
    unused, none = buffer_of(16), np.float32(0)
    for column in range(0, row, lane_bytes):
        sums, weights = parts + column, parts + row + column
        softmax(BARE, weights, part, 0, 0, blocks, none, none, unused, unused)
        for n in range(value_size + 1):
            values = sums if n == value_size else weights + (n + 1) * row
            weighted(weights, values, part, part, blocks, values)
    b, h = head // heads, head % heads
    for t in range(tokens):
        line = get(fields, OUT) + BYTES[dtype] * ((b * tokens + t) * heads + h) * group * value_size
        for g in range(group):
            of_row = parts + 4 * (g * tokens + t)
            for d in range(value_size):
                value = read_float(of_row + (d + 2) * row) / read_float(of_row)
                write_number(dtype, line + BYTES[dtype] * (g * value_size + d), value)


@numba.njit(error_model="numpy")
def _blocks(fields: Any) -> Any:
    """Return the number of blocks (see ``blocks_of``)."""
    return (get(fields, SLOTS) - get(fields, TOKENS)) // KEYS + 1


@numba.njit(error_model="numpy")
def _block(fields: Any, item: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return row of the batch, head of keys and first slot of a block, and its keys and values.

    The last two are addresses.
    """
    heads, blocks = get(fields, HEADS), _blocks(fields)
    head, begin = item // blocks, item % blocks * KEYS
    b, h = head // heads, head % heads
    keys = get(fields, KEY) + b * get(fields, KEY_BATCH) + h * get(fields, KEY_HEAD)
    values = get(fields, VALUE) + b * get(fields, VALUE_BATCH) + h * get(fields, VALUE_HEAD)
    keys += begin * get(fields, KEY_SLOT)
    return b, head, begin, keys, values + begin * get(fields, VALUE_SLOT)


@numba.njit(error_model="numpy")
def attend(fields: Any, piece: Any, following: Any, seat: Any, dtype: Any) -> None:
    """Attend to a block of keys (see ``QUERIES`` and so on); ``dtype``: of keys."""
    numba.literally(dtype)
    tokens, width = get(fields, TOKENS), get(fields, WIDTH)
    size, value_size = get(fields, SIZE), get(fields, VALUE_SIZE)
    blocks = _blocks(fields)
    b, head, begin, keys, values = _block(fields, piece)
    committed = word_at(get(fields, COMMITTED) + 8 * b)
    if begin > committed:
        claim(seat)
        return
    row, lane_bytes = 4 * width, 4 * lanes()
    part_bytes = (value_size + 2) * row
    parts = get(fields, PARTS) + (head * blocks + piece % blocks) * part_bytes
    # Many queries: what they attend to does not fit, so it is written at once.
    is_buffered = part_bytes <= PART
    if not is_buffered and not claim(seat):
        return
    part = buffer_of(PART_FLOATS) if is_buffered else parts
    scores, score_row = buffer_of(SCORES), MOST_VECTORS * lane_bytes
    score_matrix = Matrix(scores, score_row, 4)
    key_floats, value_floats = buffer_of(FLOATS), buffer_of(FLOATS)
    scale, cap = read_float(get(fields, SCALE)), read_float(get(fields, SCALE) + 4)
    is_last = begin // KEYS == committed // KEYS
    skipped = get(fields, SLOTS) - tokens - committed
    next_keys, next_values = keys, values  # are in the cache
    if following < get(fields, BATCH) * get(fields, HEADS) * blocks:
        _, _, _, next_keys, next_values = _block(fields, following)
    count = committed - begin + tokens if is_last else KEYS
    queries = get(fields, QUERIES) + head * size * row
    mask = get(fields, MASK) + b * get(fields, MASK_BATCH) + begin * row
    key_row, value_row = get(fields, KEY_SLOT), get(fields, VALUE_SLOT)
    key_bytes, value_bytes = key_row, count * value_row // value_size
    own_at = committed - begin if is_last else KEYS
    keys, key_row = _float_rows(dtype, keys, key_row, own_at, skipped, count, size, key_floats)
    values, value_row = _float_rows(
        dtype, values, value_row, own_at, skipped, count, value_size, value_floats
    )
    for column in range(0, row, score_row):
        v = min(MOST_VECTORS, (row - column) // lane_bytes)
        a_keys, b_queries = Matrix(keys, key_row, 4), Matrix(queries + column, row, 4)
        product(dtype, v, count, size, a_keys, b_queries, score_matrix, next_keys, key_bytes)
        for j in range(v):
            at, to = column + j * lane_bytes, scores + j * lane_bytes
            line, top, total = mask + at, part + row + at, part + at
            if cap:
                softmax(CAPPED, to, score_row, line, row, count, scale, cap, top, total)
            else:
                softmax(MASKED, to, score_row, line, row, count, scale, cap, top, total)
        # Rows of A are columns of the values.
        a_values, out = Matrix(values, 4, value_row), Matrix(part + 2 * row + column, row, 4)
        product(dtype, v, value_size, count, a_values, score_matrix, out, next_values, value_bytes)
        next_keys, next_values = keys, values
    if is_buffered:
        if not claim(seat):
            return
        copy_bytes(part, parts, part_bytes)
    finished = fetch_add(address_of(fields) + 8 * (FINISHED + head), 1)
    if finished == committed // KEYS:
        _combine(fields, head, committed // KEYS + 1, dtype)

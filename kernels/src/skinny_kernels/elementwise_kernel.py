"""The kernels of ``elementwise`` but for norms, compiled for this processor."""

from __future__ import annotations

from functools import partial
from typing import Any

import numba

from skinny_kernels.activations import CAP, GELU, GELU_TANH, SILU, activated, capped
from skinny_kernels.amx_tile import SIDE
from skinny_kernels.intrinsics import Known, Word, convert, copy_bytes, emits, get, word_at
from skinny_kernels.team_kernel import claim
from skinny_kernels.vectors import BYTES, F32, FLOAT32, I64, Emitter

# What a thread is given, all int64; addresses are those of the first number, strides are in bytes.
# Rotary embedding, or a copy if COS is 0, of TENSORS inputs [batch, heads, tokens, size]. Angles
# are float32 if WIDE_ANGLES is 1, else of the inputs' dtype.
COS, SIN, COS_BATCH, COS_TOKEN, SIN_BATCH, SIN_TOKEN, WIDE_ANGLES = range(7)
BATCH, TOKENS, HEAD_SIZE, TENSORS = range(7, 11)
# The same for each input.
FROM, TO, HEADS, FROM_BATCH, FROM_HEAD, FROM_TOKEN, TO_BATCH, TO_HEAD, TO_TOKEN = range(9)
TENSOR_FIELDS, ROTARY_FIELDS = 9, TENSORS + 1
# Sum of two tensors of COUNT numbers; or, in pieces, a function of one tensor and the number
# (float32) at the address SECOND: an activation, of which CAP has a limit, a product or a quotient.
FIRST, SECOND, RESULT, COUNT, SHARE, FUNCTION = range(6)
PRODUCT, QUOTIENT = CAP + 1, CAP + 2
# Copy of rows of ROW_SIZE numbers, TABLE_ROW bytes apart.
TABLE, TABLE_ROW, ROW_SIZE, IDS, IDS_COUNT, EMBEDDED = range(6)
# Conversion of COUNT numbers from or to float32.
CONVERTED_FROM, CONVERTED_TO, CONVERTED_COUNT = range(3)
# Interleaving of rows of PAIRS pairs of bfloat16 numbers.
ROWS_FROM, INTERLEAVED, INTERLEAVED_ROWS, PAIRS = range(4)
# Queries [batch, heads, tokens, size] as ``attention`` reads them, float32 [batch, heads of keys,
# size, width].
QUERY, PACKED, Q_BATCH, Q_HEAD, Q_TOKEN, Q_BATCHES, KEY_HEADS, GROUP, Q_TOKENS, Q_SIZE, WIDTH = (
    range(11)
)


@emits
def _rotate(
    emitter: Emitter,
    dtype: Known,
    angle_dtype: Known,
    source: Word,
    cos: Word,
    sin: Word,
    target: Word,
    half: Word,
) -> None:
    """Write ``(a cos - b sin, b cos + a sin)`` of the halves a and b of a head's numbers."""
    b, size = emitter.b, I64(BYTES[dtype])

    def body(k: Any, mask: Any, values: list[Any]) -> list[Any]:
        def both(address: Any, dtype: int) -> tuple[Any, Any]:
            first = emitter.at(address, k, I64(BYTES[dtype]))
            second = emitter.at(first, half, I64(BYTES[dtype]))
            return emitter.numbers(first, dtype, mask), emitter.numbers(second, dtype, mask)

        a, c = both(source, dtype)
        (cos_a, cos_c), (sin_a, sin_c) = both(cos, angle_dtype), both(sin, angle_dtype)
        to = emitter.at(target, k, size)
        minus = b.fneg(b.fmul(c, sin_a))
        emitter.write(emitter.fma(a, cos_a, minus), to, dtype, mask)
        turned = emitter.fma(c, cos_c, b.fmul(a, sin_c))
        emitter.write(turned, emitter.at(to, half, size), dtype, mask)
        return values

    emitter.vectors(half, [], body)


@emits
def _sum(
    emitter: Emitter, dtype: Known, first: Word, second: Word, target: Word, count: Word
) -> None:
    """Add ``count`` numbers to as many others."""
    emitter.transform(count, dtype, (first, second), target, emitter.b.fadd)


@emits
def _apply(
    emitter: Emitter,
    dtype: Known,
    function: Word,
    source: Word,
    target: Word,
    count: Word,
    number: Word,
) -> None:
    """Write a function (see ``FUNCTION``) of ``count`` numbers, and of the one at an address."""
    b = emitter.b

    def apply(name: int) -> None:
        other = emitter.splat(emitter.load(number, F32))
        computed = {
            CAP: lambda x: capped(emitter, x, other),
            PRODUCT: lambda x: b.fmul(x, other),
            QUOTIENT: lambda x: b.fdiv(x, other),
        }
        compute = computed.get(name, partial(activated, emitter, name))
        emitter.transform(count, dtype, (source,), target, compute)

    names = SILU, GELU_TANH, GELU, CAP, PRODUCT, QUOTIENT
    emitter.choose(function, {name: partial(apply, name) for name in names})


@emits
def _scatter(
    emitter: Emitter, dtype: Known, source: Word, target: Word, step: Word, count: Word
) -> None:
    """Write ``count`` consecutive numbers as float32, ``step`` bytes apart."""

    def body(k: Any) -> None:
        x = emitter.number(emitter.at(source, k, I64(BYTES[dtype])), dtype)
        emitter.store(x, emitter.at(target, k, step))

    emitter.repeat(count, 1, body)


@emits
def _zeros(emitter: Emitter, target: Word, step: Word, count: Word) -> None:
    """Write ``count`` zeros, float32, ``step`` bytes apart."""
    emitter.repeat(count, 1, lambda k: emitter.store(F32(0.0), emitter.at(target, k, step)))


@emits
def _interleave(
    emitter: Emitter, source: Word, target: Word, rows: Word, width: Word, pairs: Word
) -> None:
    """Write rows of ``pairs`` words of 32 bits as columns of a matrix of ``width`` columns.

    16 divides ``pairs``. Columns behind those of ``rows`` repeat the last one.
    """
    b, square = emitter.b, Emitter(emitter.module, SIDE, emitter.b)
    last, line = b.sub(rows, I64(1)), b.mul(width, I64(4))
    starts = []
    for i in range(SIDE):
        row = b.select(b.icmp_signed("<", last, I64(i)), last, I64(i))
        starts.append(square.at(source, b.mul(row, pairs), I64(4)))

    def body(k: Any) -> None:
        along = b.mul(k, I64(4))
        words = [square.load(b.add(start, along), square.vector) for start in starts]
        # In order: a store reaches into the next columns, which are written later.
        for i, column in enumerate(square.transposed(words)):
            square.store(column, square.at(target, b.add(k, I64(i)), line))

    square.repeat(pairs, SIDE, body)


@numba.njit(error_model="numpy")
def rotary(fields: Any, dtype: Any) -> None:
    """Rotate or copy all heads of all inputs."""
    numba.literally(dtype)
    size = get(fields, HEAD_SIZE)
    for n in range(get(fields, TENSORS)):
        offset = ROTARY_FIELDS + TENSOR_FIELDS * n
        for b in range(get(fields, BATCH)):
            for h in range(get(fields, offset + HEADS)):
                source = get(fields, offset + FROM) + b * get(fields, offset + FROM_BATCH)
                target = get(fields, offset + TO) + b * get(fields, offset + TO_BATCH)
                source += h * get(fields, offset + FROM_HEAD)
                target += h * get(fields, offset + TO_HEAD)
                for t in range(get(fields, TOKENS)):
                    if get(fields, COS) == 0:
                        convert(dtype, dtype, source, target, size)
                    else:
                        cos = get(fields, COS) + b * get(fields, COS_BATCH)
                        sin = get(fields, SIN) + b * get(fields, SIN_BATCH)
                        cos += t * get(fields, COS_TOKEN)
                        sin += t * get(fields, SIN_TOKEN)
                        if get(fields, WIDE_ANGLES):
                            _rotate(dtype, FLOAT32, source, cos, sin, target, size // 2)
                        else:
                            _rotate(dtype, dtype, source, cos, sin, target, size // 2)
                    source += get(fields, offset + FROM_TOKEN)
                    target += get(fields, offset + TO_TOKEN)


@numba.njit(error_model="numpy")
def add(fields: Any, dtype: Any) -> None:
    """Add two tensors."""
    numba.literally(dtype)
    first, second = get(fields, FIRST), get(fields, SECOND)
    _sum(dtype, first, second, get(fields, RESULT), get(fields, COUNT))


@numba.njit(error_model="numpy")
def apply(fields: Any, piece: Any, following: Any, seat: Any, dtype: Any) -> None:
    """Compute the function ``FUNCTION`` of ``SHARE`` numbers."""
    numba.literally(dtype)
    begin = piece * get(fields, SHARE)
    count = min(get(fields, SHARE), get(fields, COUNT) - begin)
    source = get(fields, FIRST) + begin * BYTES[dtype]
    target = get(fields, RESULT) + begin * BYTES[dtype]
    if claim(seat):
        _apply(dtype, get(fields, FUNCTION), source, target, count, get(fields, SECOND))


@numba.njit(error_model="numpy")
def embed(fields: Any, dtype: Any) -> None:
    """Copy rows of a table."""
    numba.literally(dtype)
    size = get(fields, ROW_SIZE) * BYTES[dtype]
    for n in range(get(fields, IDS_COUNT)):
        row = word_at(get(fields, IDS) + 8 * n) * get(fields, TABLE_ROW)
        copy_bytes(get(fields, TABLE) + row, get(fields, EMBEDDED) + n * size, size)


@numba.njit(error_model="numpy")
def widen(fields: Any, dtype: Any) -> None:
    """Convert to float32."""
    numba.literally(dtype)
    source, target = get(fields, CONVERTED_FROM), get(fields, CONVERTED_TO)
    convert(dtype, FLOAT32, source, target, get(fields, CONVERTED_COUNT))


@numba.njit(error_model="numpy")
def interleave(fields: Any, dtype: Any) -> None:
    """Interleave every 16 rows."""
    rows, pairs = get(fields, INTERLEAVED_ROWS), get(fields, PAIRS)
    width = min(rows, SIDE)
    for first in range(0, rows, width):
        source = get(fields, ROWS_FROM) + 4 * pairs * first
        target = get(fields, INTERLEAVED) + 4 * pairs * first
        _interleave(source, target, min(rows - first, width), width, pairs)


@numba.njit(error_model="numpy")
def pack(fields: Any, dtype: Any) -> None:
    """Put the queries of a group of heads next to each other, and zeros behind them."""
    numba.literally(dtype)
    group, tokens, size, width = (
        get(fields, GROUP),
        get(fields, Q_TOKENS),
        get(fields, Q_SIZE),
        get(fields, WIDTH),
    )
    target = get(fields, PACKED)
    for b in range(get(fields, Q_BATCHES)):
        for h in range(get(fields, KEY_HEADS)):
            for g in range(group):
                source = get(fields, QUERY) + b * get(fields, Q_BATCH)
                source += (h * group + g) * get(fields, Q_HEAD)
                for t in range(tokens):
                    row = target + 4 * (g * tokens + t)
                    _scatter(dtype, source + t * get(fields, Q_TOKEN), row, 4 * width, size)
            for row in range(group * tokens, width):
                _zeros(target + 4 * row, 4 * width, size)
            target += 4 * width * size

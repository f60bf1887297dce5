"""The kernels of ``elementwise`` but for norms, compiled for this processor."""

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from skinny_kernels.activations import CAP, GELU, GELU_TANH, SILU, activated, capped
from skinny_kernels.amx_tile import SIDE
from skinny_kernels.team_kernel import claim
from skinny_kernels.vectors import (
    BYTES,
    F32,
    FLOAT32,
    I64,
    Emitter,
    constant,
    convert,
    copy_bytes,
    get,
    processor,
    word_at,
)

# What a thread is given, all int64; addresses are those of the first number, strides are in bytes.
# Rotary embedding, or a copy if COS is 0, of TENSORS inputs [batch, heads, tokens, size]. Angles
# are float32 if WIDE_ANGLES is 1, else of the inputs' dtype.
COS, SIN, COS_BATCH, COS_TOKEN, SIN_BATCH, SIN_TOKEN, WIDE_ANGLES = range(7)
BATCH, TOKENS, HEAD_SIZE, TENSORS = range(7, 11)
# The same for each input.
FROM, TO, HEADS, FROM_BATCH, FROM_HEAD, FROM_TOKEN, TO_BATCH, TO_HEAD, TO_TOKEN = range(9)
TENSOR_FIELDS, ROTARY_FIELDS = 9, TENSORS + 1
# Sum of two tensors of COUNT numbers, or product or quotient of one and a number, in pieces.
FIRST, SECOND, RESULT, COUNT, SHARE = range(5)
# Activation of COUNT numbers, in pieces; the other fields are those of a product or quotient, and
# SECOND is the address of a limit.
FUNCTION = 5
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


@intrinsic(prefer_literal=True)
def _rotate(
    typing: Any,
    form: Any,
    angle_form: Any,
    source: Any,
    cos: Any,
    sin: Any,
    target: Any,
    half: Any,
) -> Any:
    """Write ``(a cos - b sin, b cos + a sin)`` of the halves a and b of a head's numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, source, cos, sin, target, half = arguments
        kind, emitter = form.literal_value, Emitter(builder.module, processor().lanes)
        emitter.b = b = builder
        angle_kind = angle_form.literal_value

        def body(k: Any, mask: Any, values: list[Any]) -> list[Any]:
            def both(address: Any, kind: int) -> tuple[Any, Any]:
                first = emitter.at(address, k, I64(BYTES[kind]))
                second = emitter.at(first, half, I64(BYTES[kind]))
                return emitter.numbers(first, kind, mask), emitter.numbers(second, kind, mask)

            a, c = both(source, kind)
            (cos_a, cos_c), (sin_a, sin_c) = both(cos, angle_kind), both(sin, angle_kind)
            to = emitter.at(target, k, I64(BYTES[kind]))
            minus = b.fneg(b.fmul(c, sin_a))
            emitter.write(emitter.fma(a, cos_a, minus), to, kind, mask)
            turned = emitter.fma(c, cos_c, b.fmul(a, sin_c))
            emitter.write(turned, emitter.at(to, half, I64(BYTES[kind])), kind, mask)
            return []

        emitter.vectors(half, [], body)
        return context.get_dummy_value()

    return types.void(constant(form), constant(angle_form), *[types.int64] * 5), generate


def _combination(operation: str) -> Any:
    """Return an intrinsic that combines ``count`` numbers with one of LLVM's operations.

    The second operand is ``count`` numbers too, or one float32 number for all if that is ``one``.
    """

    @intrinsic(prefer_literal=True)
    def combine(
        typing: Any, form: Any, one: Any, first: Any, second: Any, target: Any, count: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _, _, first, second, target, count = arguments
            kind, emitter = form.literal_value, Emitter(builder.module, processor().lanes)
            emitter.b = builder
            number = emitter.splat(emitter.load(second, F32)) if one.literal_value else None

            def body(k: Any, mask: Any, values: list[Any]) -> list[Any]:
                at = builder.mul(k, I64(BYTES[kind]))
                x = emitter.numbers(builder.add(first, at), kind, mask)
                y = number or emitter.numbers(builder.add(second, at), kind, mask)
                result = getattr(builder, operation)(x, y)
                emitter.write(result, builder.add(target, at), kind, mask)
                return []

            emitter.vectors(count, [], body)
            return context.get_dummy_value()

        return types.void(constant(form), constant(one), *[types.int64] * 4), generate

    return combine


_sum, _product, _quotient = map(_combination, ("fadd", "fmul", "fdiv"))


@intrinsic(prefer_literal=True)
def _apply(
    typing: Any, form: Any, activation: Any, source: Any, target: Any, count: Any, limit: Any
) -> Any:
    """Write the activation of ``count`` numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, emitter = form.literal_value, Emitter(builder.module, processor().lanes)
        emitter.b = builder
        _, _, source, target, count, limit = arguments
        size = I64(BYTES[kind])
        is_cap = activation.literal_value == CAP
        most = emitter.splat(emitter.load(limit, F32)) if is_cap else None

        def body(k: Any, mask: Any, values: list[Any]) -> list[Any]:
            x = emitter.numbers(emitter.at(source, k, size), kind, mask)
            result = (
                capped(emitter, x, most)
                if is_cap
                else activated(emitter, activation.literal_value, x)
            )
            emitter.write(result, emitter.at(target, k, size), kind, mask)
            return []

        emitter.vectors(count, [], body)
        return context.get_dummy_value()

    return types.void(constant(form), constant(activation), *[types.int64] * 4), generate


@intrinsic(prefer_literal=True)
def _scatter(typing: Any, form: Any, source: Any, target: Any, step: Any, count: Any) -> Any:
    """Write ``count`` consecutive numbers as float32, ``step`` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, target, step, count = arguments
        kind, emitter = form.literal_value, Emitter(builder.module, processor().lanes)
        emitter.b = builder

        def body(k: Any, values: list[Any]) -> list[Any]:
            x = emitter.number(emitter.at(source, k, I64(BYTES[kind])), kind)
            emitter.store(x, emitter.at(target, k, step))
            return []

        emitter.loop(I64(0), count, 1, [], body)
        return context.get_dummy_value()

    return types.void(constant(form), *[types.int64] * 4), generate


@intrinsic
def _zeros(typing: Any, target: Any, step: Any, count: Any) -> Any:
    """Write ``count`` zeros, float32, ``step`` bytes apart."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder.module, processor().lanes)
        emitter.b = builder

        def body(k: Any, values: list[Any]) -> list[Any]:
            emitter.store(F32(0.0), emitter.at(arguments[0], k, arguments[1]))
            return []

        emitter.loop(I64(0), arguments[2], 1, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def _interleave(typing: Any, source: Any, target: Any, rows: Any, width: Any, pairs: Any) -> Any:
    """Write rows of ``pairs`` words of 32 bits as columns of a matrix of ``width`` columns.

    16 divides ``pairs``. Columns behind those of ``rows`` repeat the last one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, rows, width, pairs = arguments
        emitter = Emitter(builder.module, SIDE)
        emitter.b = b = builder
        last, line = b.sub(rows, I64(1)), b.mul(width, I64(4))
        starts = []
        for i in range(SIDE):
            row = b.select(b.icmp_signed("<", last, I64(i)), last, I64(i))
            starts.append(emitter.at(source, b.mul(row, pairs), I64(4)))

        def body(k: Any, values: list[Any]) -> list[Any]:
            along = b.mul(k, I64(4))
            square = [emitter.load(b.add(start, along), emitter.vector) for start in starts]
            # In order: a store reaches into the next columns, which are written later.
            for i, column in enumerate(emitter.transposed(square)):
                emitter.store(column, emitter.at(target, b.add(k, I64(i)), line))
            return []

        emitter.loop(I64(0), pairs, SIDE, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@numba.njit(error_model="numpy")
def rotary(fields: Any, form: Any) -> None:
    """Rotate or copy all heads of all inputs."""
    numba.literally(form)
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
                        convert(form, form, source, target, size)
                    else:
                        cos = get(fields, COS) + b * get(fields, COS_BATCH)
                        sin = get(fields, SIN) + b * get(fields, SIN_BATCH)
                        cos += t * get(fields, COS_TOKEN)
                        sin += t * get(fields, SIN_TOKEN)
                        if get(fields, WIDE_ANGLES):
                            _rotate(form, FLOAT32, source, cos, sin, target, size // 2)
                        else:
                            _rotate(form, form, source, cos, sin, target, size // 2)
                    source += get(fields, offset + FROM_TOKEN)
                    target += get(fields, offset + TO_TOKEN)


@numba.njit(error_model="numpy")
def add(fields: Any, form: Any) -> None:
    """Add two tensors."""
    numba.literally(form)
    _sum(form, 0, get(fields, FIRST), get(fields, SECOND), get(fields, RESULT), get(fields, COUNT))


@numba.njit(error_model="numpy")
def multiply(fields: Any, piece: Any, following: Any, seat: Any, form: Any) -> None:
    """Multiply numbers of a tensor by one, at the address SECOND."""
    numba.literally(form)
    x, to, count = _part(fields, piece, BYTES[form])
    if claim(seat):
        _product(form, 1, x, get(fields, SECOND), to, count)


@numba.njit(error_model="numpy")
def divide(fields: Any, piece: Any, following: Any, seat: Any, form: Any) -> None:
    """Divide numbers of a tensor by one, at the address SECOND."""
    numba.literally(form)
    x, to, count = _part(fields, piece, BYTES[form])
    if claim(seat):
        _quotient(form, 1, x, get(fields, SECOND), to, count)


@numba.njit(error_model="numpy")
def activate(fields: Any, piece: Any, following: Any, seat: Any, form: Any) -> None:
    """Compute the activation ``FUNCTION`` of ``SHARE`` numbers."""
    numba.literally(form)
    source, target, count = _part(fields, piece, BYTES[form])
    function, limit = get(fields, FUNCTION), get(fields, SECOND)
    if not claim(seat):
        return
    if function == SILU:
        _apply(form, SILU, source, target, count, limit)
    elif function == GELU_TANH:
        _apply(form, GELU_TANH, source, target, count, limit)
    elif function == GELU:
        _apply(form, GELU, source, target, count, limit)
    else:
        _apply(form, CAP, source, target, count, limit)


@numba.njit(error_model="numpy")
def _part(fields: Any, piece: Any, size: Any) -> tuple[Any, Any, Any]:
    """Return addresses of the SHARE numbers of a piece and of their results, and how many."""
    begin = piece * get(fields, SHARE)
    count = min(get(fields, SHARE), get(fields, COUNT) - begin)
    return get(fields, FIRST) + begin * size, get(fields, RESULT) + begin * size, count


@numba.njit(error_model="numpy")
def embed(fields: Any, form: Any) -> None:
    """Copy rows of a table."""
    numba.literally(form)
    size = get(fields, ROW_SIZE) * BYTES[form]
    for n in range(get(fields, IDS_COUNT)):
        row = word_at(get(fields, IDS) + 8 * n) * get(fields, TABLE_ROW)
        copy_bytes(get(fields, TABLE) + row, get(fields, EMBEDDED) + n * size, size)


@numba.njit(error_model="numpy")
def widen(fields: Any, form: Any) -> None:
    """Convert to float32."""
    numba.literally(form)
    source, target = get(fields, CONVERTED_FROM), get(fields, CONVERTED_TO)
    convert(form, FLOAT32, source, target, get(fields, CONVERTED_COUNT))


@numba.njit(error_model="numpy")
def interleave(fields: Any, form: Any) -> None:
    """Interleave every 16 rows."""
    rows, pairs = get(fields, INTERLEAVED_ROWS), get(fields, PAIRS)
    width = min(rows, SIDE)
    for first in range(0, rows, width):
        source = get(fields, ROWS_FROM) + 4 * pairs * first
        target = get(fields, INTERLEAVED) + 4 * pairs * first
        _interleave(source, target, min(rows - first, width), width, pairs)


@numba.njit(error_model="numpy")
def pack(fields: Any, form: Any) -> None:
    """Put the queries of a group of heads next to each other, and zeros behind them."""
    numba.literally(form)
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
                    _scatter(form, source + t * get(fields, Q_TOKEN), row, 4 * width, size)
            for row in range(group * tokens, width):
                _zeros(target + 4 * row, 4 * width, size)
            target += 4 * width * size

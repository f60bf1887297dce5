"""The kernel of norms, compiled for this processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba

from skinny_kernels.intrinsics import Known, Word, emits, get
from skinny_kernels.team_kernel import claim
from skinny_kernels.vectors import BYTES, F32, I64, Emitter

# What a thread is given, all int64; addresses are those of the first number, strides are in bytes.
# Inputs are [batch, heads, tokens, size], ROWS in all, with contiguous outputs; EPSILON is the
# address of two float32 numbers, epsilon and what is added to the weights. With BIAS, it is a
# layer norm, without an RMS norm.
INPUT, OUTPUT, WEIGHT, EPSILON, ROWS, SIZE, HEADS, TOKENS = range(8)
BATCH_STEP, HEAD_STEP, TOKEN_STEP, SHARE, BIAS = range(8, 13)


class _Row(NamedTuple):
    """A row that is normalised; ``constants`` is the address of ``EPSILON``'s two numbers."""

    source: Any
    target: Any
    constants: Any
    size: Any


def _mean(emitter: Emitter, dtype: int, row: _Row, add: Callable[..., Any]) -> Any:
    """Emit: the mean of what ``add(x, mask, total)`` adds up for every number."""

    def body(k: Any, mask: Any, sums: list[Any]) -> list[Any]:
        x = emitter.numbers(emitter.at(row.source, k, I64(BYTES[dtype])), dtype, mask)
        return [add(x, mask, sums[0])]

    (total,) = emitter.vectors(row.size, [emitter.splat(0.0)], body)
    return emitter.b.fdiv(emitter.lane_sum(total), emitter.b.sitofp(row.size, F32))


def _scale(emitter: Emitter, dtype: int, row: _Row, center: Any = None) -> Any:
    """Emit: a vector of ``1 / sqrt(mean((x - center)^2) + epsilon)``; None: center 0."""
    b = emitter.b

    def add_square(x: Any, mask: Any, total: Any) -> Any:
        if center is not None:
            x = b.fsub(x, center)
            if mask is not None:  # numbers behind the row's
                x = b.select(mask, x, emitter.splat(0.0))
        return emitter.fma(x, x, total)

    mean = _mean(emitter, dtype, row, add_square)
    root = emitter.call("llvm.sqrt.f32", F32, b.fadd(mean, emitter.load(row.constants, F32)))
    return emitter.splat(b.fdiv(F32(1.0), root))


@emits
def _normalise(emitter: Emitter, dtype: Known, row: _Row, weight: Word) -> None:
    """Write ``x / sqrt(mean(x^2) + epsilon)``, rounded where PyTorch rounds, times the weights."""
    b, scale = emitter.b, _scale(emitter, dtype, row)
    added = emitter.load(b.add(row.constants, I64(4)), F32)
    # Llama's modules round before the weights, Gemma's, which add one to them, behind.
    early = b.fcmp_ordered("==", added, F32(0.0))
    added = emitter.splat(added)

    def normalised(x: Any, factor: Any) -> Any:
        x = b.fmul(x, scale)
        x = b.select(early, emitter.through(x, dtype), x)
        return b.fmul(x, b.fadd(factor, added))

    emitter.transform(row.size, dtype, (row.source, weight), row.target, normalised)


@emits
def _standardise(emitter: Emitter, dtype: Known, row: _Row, weight: Word, bias: Word) -> None:
    """Write ``(x - mean) / sqrt(variance + epsilon)`` times the weights, plus the bias."""
    b = emitter.b
    mean = emitter.splat(_mean(emitter, dtype, row, lambda x, mask, total: b.fadd(total, x)))
    scale = _scale(emitter, dtype, row, mean)

    def standardised(x: Any, factor: Any, added: Any) -> Any:
        return emitter.fma(b.fmul(b.fsub(x, mean), scale), factor, added)

    emitter.transform(row.size, dtype, (row.source, weight, bias), row.target, standardised)


@numba.njit(error_model="numpy")
def norm(fields: Any, piece: Any, following: Any, seat: Any, dtype: Any) -> None:
    """Normalise ``SHARE`` rows."""
    numba.literally(dtype)
    size, share = get(fields, SIZE), get(fields, SHARE)
    heads, tokens = get(fields, HEADS), get(fields, TOKENS)
    if not claim(seat):
        return
    for row in range(piece * share, min((piece + 1) * share, get(fields, ROWS))):
        position = row // tokens % heads * get(fields, HEAD_STEP)
        position += row // (tokens * heads) * get(fields, BATCH_STEP)
        position += row % tokens * get(fields, TOKEN_STEP)
        source = get(fields, INPUT) + position
        weight, bias = get(fields, WEIGHT), get(fields, BIAS)
        target = get(fields, OUTPUT) + row * size * BYTES[dtype]
        given = _Row(source, target, get(fields, EPSILON), size)
        if bias:
            _standardise(dtype, given, weight, bias)
        else:
            _normalise(dtype, given, weight)

"""The kernel of norms, compiled for this processor."""

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from skinny_kernels.team_kernel import claim
from skinny_kernels.vectors import BYTES, F32, I64, Emitter, constant, get, processor

# What a thread is given, all int64; addresses are those of the first number, strides are in bytes.
# Inputs are [batch, heads, tokens, size], ROWS in all, with contiguous outputs; EPSILON is the
# address of two float32 numbers, epsilon and what is added to the weights. With BIAS, it is a
# layer norm, without an RMS norm.
INPUT, OUTPUT, WEIGHT, EPSILON, ROWS, SIZE, HEADS, TOKENS = range(8)
BATCH_STEP, HEAD_STEP, TOKEN_STEP, SHARE, BIAS = range(8, 13)


class _Norm:
    """Emits what norms of a row have in common."""

    def __init__(
        self, builder: Any, form: Any, source: Any, target: Any, constants: Any, size: Any
    ) -> None:
        self.kind, self.emitter = form.literal_value, Emitter(builder.module, processor().lanes)
        self.emitter.b = self.b = builder
        self.source, self.target = source, target
        self.constants, self.size = constants, size
        self.step = I64(BYTES[self.kind])

    def mean(self, add: Any) -> Any:
        """Return the mean of what ``add(x, mask, total)`` adds up for every number."""
        emitter, b = self.emitter, self.b

        def body(k: Any, mask: Any, sums: list[Any]) -> list[Any]:
            x = emitter.numbers(emitter.at(self.source, k, self.step), self.kind, mask)
            return [add(x, mask, sums[0])]

        (total,) = emitter.vectors(self.size, [emitter.splat(0.0)], body)
        return b.fdiv(emitter.lane_sum(total), b.sitofp(self.size, F32))

    def scale(self, center: Any) -> Any:
        """Return a vector of ``1 / sqrt(mean((x - center)^2) + epsilon)``; None: center 0."""
        emitter, b = self.emitter, self.b

        def add_square(x: Any, mask: Any, total: Any) -> Any:
            if center is not None:
                x = b.fsub(x, center)
                if mask is not None:  # numbers behind the row's
                    x = b.select(mask, x, emitter.splat(0.0))
            return emitter.fma(x, x, total)

        variance = b.fadd(self.mean(add_square), emitter.load(self.constants, F32))
        sqrt = b.module.declare_intrinsic("llvm.sqrt", [F32])
        return emitter.splat(b.fdiv(F32(1.0), b.call(sqrt, [variance])))

    def write(self, result: Any) -> None:
        """Write ``result(x, bytes before x, mask)`` for every number."""
        emitter, b = self.emitter, self.b

        def body(k: Any, mask: Any, values: list[Any]) -> list[Any]:
            at = emitter.at(I64(0), k, self.step)
            x = emitter.numbers(b.add(self.source, at), self.kind, mask)
            emitter.write(result(x, at, mask), b.add(self.target, at), self.kind, mask)
            return []

        emitter.vectors(self.size, [], body)


@intrinsic(prefer_literal=True)
def _normalise(
    typing: Any, form: Any, source: Any, weight: Any, target: Any, epsilon: Any, size: Any
) -> Any:
    """Write ``x / sqrt(mean(x^2) + epsilon)``, rounded where PyTorch rounds, times the weights."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, weight, target, constants, size = arguments
        norm = _Norm(builder, form, source, target, constants, size)
        emitter, b = norm.emitter, builder
        scale = norm.scale(None)
        added = emitter.load(b.add(constants, I64(4)), F32)
        # Llama's forms round before the weights, Gemma's, which add one to them, behind.
        early = b.fcmp_ordered("==", added, F32(0.0))
        added = emitter.splat(added)

        def result(x: Any, at: Any, mask: Any) -> Any:
            x = b.fmul(x, scale)
            x = b.select(early, emitter.through(x, norm.kind), x)
            return b.fmul(x, b.fadd(emitter.numbers(b.add(weight, at), norm.kind, mask), added))

        norm.write(result)
        return context.get_dummy_value()

    return types.void(constant(form), *[types.int64] * 5), generate


@intrinsic(prefer_literal=True)
def _standardise(
    typing: Any,
    form: Any,
    source: Any,
    weight: Any,
    bias: Any,
    target: Any,
    epsilon: Any,
    size: Any,
) -> Any:
    """Write ``(x - mean) / sqrt(variance + epsilon)`` times the weights, plus the bias."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, weight, bias, target, constants, size = arguments
        norm = _Norm(builder, form, source, target, constants, size)
        emitter, kind, b = norm.emitter, norm.kind, builder
        mean = norm.mean(lambda x, mask, total: b.fadd(total, x))
        scale = norm.scale(emitter.splat(mean))

        def result(x: Any, at: Any, mask: Any) -> Any:
            x = b.fmul(b.fsub(x, emitter.splat(mean)), scale)
            factor = emitter.numbers(b.add(weight, at), kind, mask)
            return emitter.fma(x, factor, emitter.numbers(b.add(bias, at), kind, mask))

        norm.write(result)
        return context.get_dummy_value()

    return types.void(constant(form), *[types.int64] * 6), generate


@numba.njit(error_model="numpy")
def norm(fields: Any, piece: Any, following: Any, seat: Any, form: Any) -> None:
    """Normalise ``SHARE`` rows."""
    numba.literally(form)
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
        target = get(fields, OUTPUT) + row * size * BYTES[form]
        if bias:
            _standardise(form, source, weight, bias, target, get(fields, EPSILON), size)
        else:
            _normalise(form, source, weight, target, get(fields, EPSILON), size)

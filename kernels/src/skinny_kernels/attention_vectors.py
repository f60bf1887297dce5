"""The vector operations of ``attention_kernel``, as functions that numba calls.

A vector holds the same number of consecutive rows, so that no operation needs a sum across its
lanes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from skinny_kernels.activations import capped
from skinny_kernels.vectors import (
    BYTES,
    F32,
    FLOAT32,
    I64,
    Emitter,
    constant,
    processor,
)

# Rows of A in a tile, by vectors of B: as many sums as the registers hold, next to those vectors.
TILES = {16: (16, 12, 8), 8: (8, 6, 4), 4: (16, 12, 8)}
MOST_VECTORS = 3
BARE, MASKED, CAPPED = range(3)  # forms of softmax


class AttentionEmitter(Emitter):
    """Emits the functions that compute with whole vectors of rows."""

    def sums(self, r: int, v: int, size: int) -> Any:
        """Return the function that computes r rows of ``C = A B``, v vectors wide.

        ``void (a, row of a, column of a, count, b, row of b, c, row of c, ahead)``, all int64:
        addresses, and strides in bytes; ``count`` is the common dimension. Meanwhile ``count * r *
        size`` bytes from ``ahead`` on are read into the L2 cache.
        """

        def emit(
            a: Any,
            a_row: Any,
            a_column: Any,
            count: Any,
            b: Any,
            b_row: Any,
            c: Any,
            c_row: Any,
            ahead: Any,
        ) -> None:
            builder = self.b
            rows = [self.at(a, I64(i), a_row) for i in range(r)]
            bytes_of = 4 * self.lanes

            def add(k: Any, sums: list[Any]) -> list[Any]:
                self.prefetch(self.at(ahead, k, I64(r * size)))
                line = self.at(b, k, b_row)
                vectors = [self.numbers(builder.add(line, I64(j * bytes_of)), 0) for j in range(v)]
                updated = []
                for i in range(r):
                    factor = self.splat(self.load(self.at(rows[i], k, a_column), F32))
                    updated += [self.fma(factor, vectors[j], sums[i * v + j]) for j in range(v)]
                return updated

            products = self.loop(I64(0), count, 1, [self.splat(0.0)] * (r * v), add)
            for i in range(r):
                for j in range(v):
                    line = builder.add(self.at(c, I64(i), c_row), I64(j * bytes_of))
                    self.store(products[i * v + j], line)
            builder.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [I64] * 9)
        return self.function(f"sums_{r}_{v}_{size}", kind, emit)

    def softmax(self, form: int) -> Any:
        """Return the function that exponentiates a vector of rows in place.

        ``void (scores, row, mask, row of the mask, count, scale, cap, maximum, total)``: ``count``
        vectors, ``row`` bytes apart; scores become e^(score * scale + mask - maximum). ``CAPPED``:
        the scaled score is capped (see ``activations.capped``) before the mask is added. ``BARE``:
        neither mask nor scale nor cap is used.
        """

        def emit(
            scores: Any,
            row: Any,
            mask: Any,
            mask_row: Any,
            count: Any,
            scale: Any,
            cap: Any,
            top: Any,
            total: Any,
        ) -> None:
            b = self.b
            factor, limit = self.splat(scale), self.splat(cap)

            def add_mask(k: Any, maxima: list[Any]) -> list[Any]:
                line = self.at(scores, k, row)
                value = self.numbers(line, FLOAT32)
                if form != BARE:
                    hidden = self.numbers(self.at(mask, k, mask_row), FLOAT32)
                    if form == CAPPED:
                        value = b.fadd(capped(self, b.fmul(value, factor), limit), hidden)
                    else:
                        value = self.fma(value, factor, hidden)
                    self.store(value, line)
                return [b.select(b.fcmp_ordered(">", value, maxima[0]), value, maxima[0])]

            def raise_e(k: Any, sums: list[Any]) -> list[Any]:
                line = self.at(scores, k, row)
                power = self.exponential(b.fsub(self.numbers(line, FLOAT32), maximum))
                self.store(power, line)
                return [b.fadd(sums[0], power)]

            (maximum,) = self.loop(I64(0), count, 1, [self.splat(float("-inf"))], add_mask)
            (weight_sum,) = self.loop(I64(0), count, 1, [self.splat(0.0)], raise_e)
            self.store(maximum, top)
            self.store(weight_sum, total)
            b.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [I64] * 5 + [F32] * 2 + [I64] * 2)
        return self.function(f"softmax_{form}", kind, emit)

    def weighted(self) -> Any:
        """Return ``void (weights, parts, row, part, count, out)``: out = sum of weight * part.

        For a vector of rows; weights are ``row`` bytes apart, parts ``part`` bytes.
        """

        def emit(weights: Any, parts: Any, row: Any, part: Any, count: Any, out: Any) -> None:
            def add(k: Any, sums: list[Any]) -> list[Any]:
                weight = self.numbers(self.at(weights, k, row), FLOAT32)
                return [self.fma(weight, self.numbers(self.at(parts, k, part), FLOAT32), sums[0])]

            self.store(self.loop(I64(0), count, 1, [self.splat(0.0)], add)[0], out)
            self.b.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [I64] * 6)
        return self.function("weighted", kind, emit)


@intrinsic
def lanes(typing: Any) -> Any:
    """Return the float32 numbers in a vector."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(processor().lanes)

    return types.int64(), generate


@intrinsic(prefer_literal=True)
def buffer_of(typing: Any, count: Any) -> Any:
    """Return the address of ``count`` float32 numbers of this call's own."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            buffer = builder.alloca(ir.ArrayType(F32, count.literal_value))
        buffer.align = 64
        return builder.ptrtoint(buffer, I64)

    return types.int64(constant(count)), generate


@intrinsic(prefer_literal=True)
def product(
    typing: Any,
    form: Any,
    v: Any,
    rows: Any,
    a: Any,
    a_row: Any,
    a_column: Any,
    count: Any,
    b: Any,
    b_row: Any,
    c: Any,
    c_row: Any,
    ahead: Any,
    ahead_row: Any,
) -> Any:
    """Compute ``C = A B`` for ``rows`` rows of A and v vectors of B (see ``sums``).

    For each row of A, ``ahead_row`` bytes of a dtype are read ahead.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter = AttentionEmitter(builder.module, processor().lanes)
        emitter.b = builder
        _, v, rows, a, a_row, *others, c, c_row, ahead, ahead_row = arguments
        done = builder.append_basic_block("product_done")
        choice = builder.switch(v, done)
        for width, height in enumerate(TILES[processor().lanes], start=1):
            block = builder.append_basic_block(f"vectors_{width}")
            choice.add_case(I64(width), block)
            builder.position_at_end(block)
            begin = I64(0)
            for r in (height, 1):
                tile = emitter.sums(r, width, BYTES[form.literal_value])

                def body(n: Any, values: list[Any], r: int = r, tile: Any = tile) -> list[Any]:
                    at_a, at_c = emitter.at(a, n, a_row), emitter.at(c, n, c_row)
                    fetched = emitter.at(ahead, n, ahead_row)
                    builder.call(tile, [at_a, a_row, *others, at_c, c_row, fetched])
                    return [builder.add(n, I64(r))]

                end = builder.sub(rows, I64(r - 1))
                (begin,) = emitter.loop(begin, end, r, [begin], body)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(constant(form), *[types.int64] * 12), generate


@intrinsic(prefer_literal=True)
def softmax(
    typing: Any,
    form: Any,
    scores: Any,
    row: Any,
    mask: Any,
    mask_row: Any,
    count: Any,
    scale: Any,
    cap: Any,
    top: Any,
    total: Any,
) -> Any:
    """See ``AttentionEmitter.softmax``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter = AttentionEmitter(builder.module, processor().lanes)
        builder.call(emitter.softmax(form.literal_value), arguments[1:])
        return context.get_dummy_value()

    integers = [types.int64] * 5
    numbers = types.float32, types.float32, types.int64, types.int64
    return types.void(constant(form), *integers, *numbers), generate


@intrinsic
def weighted(
    typing: Any, weights: Any, parts: Any, row: Any, part: Any, count: Any, out: Any
) -> Any:
    """See ``AttentionEmitter.weighted``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(AttentionEmitter(builder.module, processor().lanes).weighted(), arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def read_float(typing: Any, address: Any) -> Any:
    """Return the float32 number at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder.module, processor().lanes)
        emitter.b = builder
        return emitter.load(arguments[0], F32)

    return types.float32(types.int64), generate


@intrinsic
def read_int(typing: Any, address: Any) -> Any:
    """Return the int64 number at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], I64.as_pointer()))

    return types.int64(types.int64), generate


@intrinsic(prefer_literal=True)
def write_number(typing: Any, form: Any, address: Any, value: Any) -> Any:
    """Write a float32 number to an address, in a dtype."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, emitter = form.literal_value, Emitter(builder.module, processor().lanes)
        emitter.b = builder
        emitter.store(emitter.rounded(arguments[2], kind), arguments[1], align=BYTES[kind])
        return context.get_dummy_value()

    return types.void(constant(form), types.int64, types.float32), generate

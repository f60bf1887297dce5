"""A tile of ``linear_kernel`` for weights in the block formats of GGUF files.

Rows of W are read as blocks, as they lie in the file. Rows of x are rounded to whole numbers of 8
bits with a scale for every 32 of them (see ``elementwise.rounded``), so that a product of 32
numbers is a sum of whole numbers, which is exact, times two scales. Sums are float32 and are added
up in an order that depends on nothing but the number of inputs.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from token_recycling.model.cpu.block_formats import FORMATS, BlockRow
from token_recycling.model.cpu.tile import Tile, TileArguments, tile_function
from token_recycling.model.cpu.vectors import (
    F32,
    FLOAT32,
    I8,
    I16,
    I32,
    I64,
    LINE,
    ROUND,
    Emitter,
    Processor,
)

GROUP = 32  # inputs that share a scale
PADDED = 64  # inputs, to a multiple of which a row is filled up with zeros
QUARTET = 4  # products that one instruction adds up
QUARTETS, SIXTEENS = -1, -2
SMALLEST = 1e-30  # groups of smaller inputs are rounded to 0, so that a scale has an inverse
# A rounded row has three parts of as many bytes as it has inputs, with those that fill it up: the
# whole numbers, their sums (see ``sums_of``), and for every four of them their scale, float32.
NUMBERS, SUMS, SCALES, PARTS = range(4)


def row_bytes(inputs: int) -> int:
    """Return the bytes of a rounded row."""
    return PARTS * -(-inputs // PADDED) * PADDED


def sums_of(ggml_type: int, cpu: Processor) -> int:
    """Return what is written for the sums of a row's rounded numbers.

    Returns:
        An offset of the weights: minus its products with the sums of four numbers, as integers;
        0: nothing; ``QUARTETS`` or ``SIXTEENS``: sums of four or of 16 numbers times their scale.
    """
    form = FORMATS[ggml_type]
    if form.minima:
        return QUARTETS if form.numbers == GROUP else SIXTEENS
    return offset_of(ggml_type, cpu)


def offset_of(ggml_type: int, cpu: Processor) -> int:
    """Return what is subtracted from the weights' whole numbers, as the tile reads them."""
    form = FORMATS[ggml_type]
    return 0 if form.signed and not cpu.dot_unsigned else form.offset


class _Dots(Emitter):
    """Emits products of whole numbers of 8 bits."""

    def __init__(self, module: Any, cpu: Processor) -> None:
        super().__init__(module, cpu.lanes)
        self.cpu = cpu
        self.integer_vector = ir.VectorType(I32, cpu.lanes)
        self.width = QUARTET * cpu.lanes  # numbers in a vector of bytes

    def dot(self, total: Any, weights: Any, inputs: Any, *, signed: bool) -> Any:
        """Add the products of every four bytes to a vector of 32-bit numbers.

        Args:
            total: of ``integer_vector`` type.
            weights: vector of bytes, without sign unless ``signed``.
            inputs: vector of bytes with sign, never -128.
            signed: weights have a sign; only where the processor has no ``dot_unsigned``.
        """
        b, cpu = self.b, self.cpu
        if cpu.dot_unsigned:
            kind = ir.FunctionType(self.integer_vector, [self.integer_vector] * 3)
            code = f"{cpu.dot_unsigned} $3, $2, $0"
            words = [b.bitcast(value, self.integer_vector) for value in (weights, inputs)]
            return b.asm(kind, code, "=v,0,v,v", [total, *words], False)
        if cpu.lanes == 4:
            return self._call("llvm.aarch64.neon.sdot.v4i32.v16i8", total, weights, inputs)
        if signed:  # the first factor of the next instruction has no sign
            zero = ir.Constant(weights.type, [0] * self.width)
            negative = b.icmp_signed("<", weights, zero)
            weights = b.select(negative, b.sub(zero, weights), weights)
            inputs = b.select(negative, b.sub(zero, inputs), inputs)
        prefix = "llvm.x86.avx512" if cpu.lanes == 16 else "llvm.x86.avx2"
        first, second = (
            ("pmaddubs.w.512", "pmaddw.d.512") if cpu.lanes == 16 else ("pmadd.ub.sw", "pmadd.wd")
        )
        pairs = ir.VectorType(I16, 2 * cpu.lanes)
        products = self._call(f"{prefix}.{first}", weights, inputs, result=pairs)
        ones = ir.Constant(pairs, [1] * pairs.count)
        return b.add(
            total, self._call(f"{prefix}.{second}", products, ones, result=self.integer_vector)
        )

    def _call(self, name: str, *arguments: Any, result: Any = None) -> Any:
        kind = ir.FunctionType(result or self.integer_vector, [value.type for value in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.module, kind, name), arguments)


class Rounding(_Dots):
    """Emits the function that rounds a row of x.

    Args of the constructor:
        sums: what is written for the sums of the numbers (see ``sums_of``).
    """

    def __init__(self, module: Any, cpu: Processor, sums: int) -> None:
        super().__init__(module, cpu)
        self.sums = sums

    def row(self) -> Any:
        """Return ``void (x, to, inputs)``, all int64: addresses, and a multiple of 32 inputs."""
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        return self.function(f"round_{self.sums}", kind, self._emit)

    def _emit(self, x: Any, to: Any, inputs: Any) -> None:
        b = self.b
        self.x, self.to = x, to
        self.padded = b.and_(b.add(inputs, I64(PADDED - 1)), I64(-PADDED))
        step = max(self.width, GROUP)

        def body(k: Any, values: list[Any]) -> list[Any]:
            self._round(k, step // GROUP, step // GROUP)
            return []

        full_end = b.and_(inputs, I64(-step))
        self.loop(I64(0), full_end, step, [], body)
        if step > GROUP:
            half, done = b.append_basic_block("half"), b.append_basic_block("rounded")
            b.cbranch(b.icmp_signed("<", full_end, inputs), half, done)
            b.position_at_end(half)
            self._round(full_end, 1, step // GROUP)
            b.branch(done)
            b.position_at_end(done)
        if self.sums == SIXTEENS:
            self._write_sixteens(inputs)
        b.ret_void()

    def _round(self, k: Any, groups: int, capacity: int) -> None:
        """Round groups of inputs from number k on, and write zeros for those up to ``capacity``."""
        vectors, scales = [], []
        byte = ir.VectorType(I8, self.lanes)
        for group in range(capacity):
            if group >= groups:
                vectors += [ir.Constant(byte, [0] * self.lanes)] * (GROUP // self.lanes)
                scales.append(self.splat(0.0))
                continue
            first = self.b.add(k, I64(group * GROUP))
            places = [self.b.add(first, I64(n)) for n in range(0, GROUP, self.lanes)]
            inputs = [self._input(place) for place in places]
            scale, inverse = self._scale(inputs)
            scales.append(self.splat(scale))
            for value in inputs:
                shifted = self.fma(value, inverse, self.splat(ROUND))
                vectors.append(self.b.trunc(self.b.bitcast(shifted, self.integer_vector), byte))
        for n in range(0, len(vectors), QUARTET):
            at = self.b.add(k, I64(n * self.lanes))
            values = self.joined(vectors[n : n + QUARTET])
            lane_groups = [(n * self.lanes + QUARTET * lane) // GROUP for lane in range(self.lanes)]
            scale = scales[lane_groups[0]]
            if lane_groups[0] != lane_groups[-1]:
                picks = [
                    lane + self.lanes * (i != lane_groups[0]) for lane, i in enumerate(lane_groups)
                ]
                scale = self.shuffled(scale, scales[lane_groups[-1]], picks)
            self.store(values, self._place(NUMBERS, at), align=1)
            self.store(scale, self._place(SCALES, at))
            self._write_sums(values, scale, self._place(SUMS, at))

    def _scale(self, inputs: list[Any]) -> tuple[Any, Any]:
        """Return the scale of a group, and a vector of its inverse."""
        b, zero = self.b, self.splat(0.0)
        largest, others = zero, zero
        for value in inputs:
            size = b.select(b.fcmp_ordered("<", value, zero), b.fsub(zero, value), value)
            largest = b.select(b.fcmp_ordered(">", size, largest), size, largest)
            others = self.fma(value, zero, others)  # NaN if a number is not finite
        top = self.across(largest, lambda a, c: b.select(b.fcmp_ordered(">", a, c), a, c))
        scale = b.fadd(b.fmul(top, F32(1 / 127)), self.lane_sum(others))
        is_small = b.fcmp_ordered("<", top, F32(SMALLEST))
        inverse = b.select(is_small, F32(0.0), b.fdiv(F32(127.0), top))
        return scale, self.splat(inverse)

    def _place(self, part: int, k: Any) -> Any:
        """Return the address of what belongs to number k in a part of the rounded row."""
        return self.b.add(self.b.add(self.to, self.b.mul(self.padded, I64(part))), k)

    def _input(self, k: Any) -> Any:
        return self.numbers(self.at(self.x, k, I64(4)), FLOAT32)

    def _quartets(self, values: Any) -> Any:
        ones = ir.Constant(values.type, [1] * self.width)
        return self.dot(
            ir.Constant(self.integer_vector, [0] * self.lanes), ones, values, signed=False
        )

    def _write_sums(self, values: Any, scale: Any, to: Any) -> None:
        b = self.b
        if self.sums > 0:
            factor = ir.Constant(self.integer_vector, [-self.sums] * self.lanes)
            self.store(b.mul(self._quartets(values), factor), to)
        if self.sums == QUARTETS:
            sums = b.sitofp(self._quartets(values), self.vector)
            self.store(b.fmul(sums, scale), to)

    def _write_sixteens(self, inputs: Any) -> None:
        b, lanes = self.b, self.lanes

        def pairs(low: Any, high: Any) -> Any:
            """Return the sums of two neighbours each."""
            even, odd = (self.shuffled(low, high, range(start, 2 * lanes, 2)) for start in (0, 1))
            return b.fadd(even, odd)

        def step(k: Any, values: list[Any]) -> list[Any]:
            sums = []
            for n in range(QUARTET):
                at = b.add(k, I64(n * self.width))
                numbers = self.load(self._place(NUMBERS, at), ir.VectorType(I8, self.width))
                scale = self.load(self._place(SCALES, at), self.vector)
                sums.append(b.fmul(b.sitofp(self._quartets(numbers), self.vector), scale))
            combined = pairs(pairs(*sums[:2]), pairs(*sums[2:]))
            self.store(combined, self._place(SUMS, b.udiv(k, I64(QUARTET))))
            return []

        self.loop(I64(0), inputs, QUARTET * self.width, [], step)


class BlockTile(_Dots, Tile):
    """Emits the function that multiplies R rows of W by S rows of x.

    Meanwhile ``ahead`` other rows of W are read into the L2 cache.
    """

    def __init__(
        self, module: Any, cpu: Processor, ggml_type: int, r: int, s: int, ahead: int
    ) -> None:
        super().__init__(module, cpu)
        self.form, self.r, self.s, self.rows_ahead = FLOAT32, r, s, ahead
        self.ggml_type, self.blocks = ggml_type, FORMATS[ggml_type]
        # Numbers that are read at once: a block, or several that fill a vector.
        self.numbers_at_once = max(self.blocks.numbers, self.width)

    def tile(self) -> Any:
        """Return ``void (TileArguments)``; y and the bias are float32."""
        name = f"block_tile_{self.ggml_type}_{self.r}_{self.s}_{self.rows_ahead}"
        return tile_function(self, name, self._emit)

    def _emit(self, given: TileArguments) -> None:
        w, w_stride, x, x_stride, inputs, y, y_stride, bias, ahead = given
        b = self.b
        self.w = [self.at(w, I64(r), w_stride) for r in range(self.r)]
        self.ahead = [self.at(ahead, I64(r), w_stride) for r in range(self.rows_ahead)]
        padded = b.and_(b.add(inputs, I64(PADDED - 1)), I64(-PADDED))
        rows = [self.at(x, I64(s), x_stride) for s in range(self.s)]
        self.x = [[b.add(row, b.mul(padded, I64(part))) for part in range(PARTS)] for row in rows]
        totals = [self.splat(0.0)] * (self.r * self.s)
        full_end = b.and_(inputs, I64(-self.numbers_at_once))
        totals = self.loop(I64(0), full_end, self.numbers_at_once, totals, self._add_products)
        if self.numbers_at_once > self.blocks.numbers:
            totals = self._last_block(full_end, inputs, totals)
        self._write(self._add_up(totals), y, y_stride, bias)
        b.ret_void()

    def _last_block(self, begin: Any, inputs: Any, totals: list[Any]) -> list[Any]:
        """Add the products of a block that does not fill a vector, if there is one."""
        b = self.b
        before = b.block
        block, done = b.append_basic_block("rest"), b.append_basic_block("added")
        b.cbranch(b.icmp_signed("<", begin, inputs), block, done)
        b.position_at_end(block)
        updated = self._add_products(begin, totals, last=True)
        after = b.block
        b.branch(done)
        b.position_at_end(done)
        return [self.either((a, before), (c, after)) for a, c in zip(totals, updated)]

    def _add_products(self, k: Any, totals: list[Any], *, last: bool = False) -> list[Any]:
        """Add the products of ``numbers_at_once`` inputs from number k on.

        ``last``: there is one block left; the inputs behind it are 0.
        """
        b, form, lanes = self.b, self.blocks, self.lanes
        totals = list(totals)
        first = b.mul(b.udiv(k, I64(form.numbers)), I64(form.size))
        count = self.numbers_at_once // form.numbers
        for row in [] if last else self.ahead:
            for line in range(0, count * form.size, LINE):
                self.prefetch(b.add(b.add(row, first), I64(line)))
        steps = [0 if last else form.size * n for n in range(count)]
        rows = [[b.add(b.add(row, first), I64(step)) for step in steps] for row in self.w]
        opened = BlockRow.opened(self, form, rows)
        signed = form.signed and not self.cpu.dot_unsigned
        offset = offset_of(self.ggml_type, self.cpu)
        for n in range(0, self.numbers_at_once, self.width):
            numbers = [n + QUARTET * lane for lane in range(lanes)]
            at = b.add(k, I64(n))
            weights = [blocks.quants(n, self.width, flipped=not signed) for blocks in opened]
            scales = [blocks.scale(numbers) for blocks in opened]
            for s, parts in enumerate(self.x):
                values, sums, x_scales = (b.add(part, at) for part in parts)
                x = self.load(values, ir.VectorType(I8, self.width))
                start = ir.Constant(self.integer_vector, [0] * lanes)
                if offset:
                    start = self.load(sums, self.integer_vector)
                scale = self.load(x_scales, self.vector)
                for r in range(self.r):
                    i = r * self.s + s
                    product = b.sitofp(self.dot(start, weights[r], x, signed=signed), self.vector)
                    totals[i] = self.fma(product, b.fmul(scales[r], scale), totals[i])
            if form.minima and form.numbers == GROUP:
                self._add_minima([blocks.minimum(numbers) for blocks in opened], at, totals)
        if form.minima and form.numbers > GROUP:
            for n in range(0, form.numbers // 16, lanes):
                numbers = [16 * (n + lane) for lane in range(lanes)]
                minima = [blocks.minimum(numbers) for blocks in opened]
                self._add_minima(minima, b.add(b.udiv(k, I64(4)), I64(4 * n)), totals)
        return totals

    def _add_minima(self, minima: list[Any], at: Any, totals: list[Any]) -> None:
        """Add minima times the sums of their inputs, which are ``at`` bytes behind the first."""
        for s, parts in enumerate(self.x):
            x = self.load(self.b.add(parts[SUMS], at), self.vector)
            for r in range(self.r):
                i = r * self.s + s
                totals[i] = self.fma(minima[r], x, totals[i])

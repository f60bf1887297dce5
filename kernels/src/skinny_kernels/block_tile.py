"""A tile of ``linear_kernel`` for weights in the block formats of GGUF files.

As many rows of W as a vector has lanes are multiplied by up to 16 rows of x (see ``block_formats``
for W, ``block_inputs`` for x, ``block_products`` and ``block_amx`` for the products).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from skinny_kernels.amx_tile import SIDE
from skinny_kernels.block_amx import AmxProducts, can_multiply
from skinny_kernels.block_formats import FORMATS, QUARTET, ROWS, InterleavedBlocks
from skinny_kernels.block_inputs import GROUP, RECORD
from skinny_kernels.block_products import (
    CHUNK,
    GROUPS,
    MINIMA,
    SCALES,
    SCALES_OF_A_GROUP,
    UNPACKED,
    Products,
    is_signed,
)
from skinny_kernels.tile import TileArguments, tile_function
from skinny_kernels.vectors import FLOAT32, I8, I32, I64, LINE, Emitter, Processor

MOST_ROWS = 64  # of x in a tile
AHEAD = 2**13  # bytes between the blocks that are multiplied and those that are read into the cache
# Rows of x that are multiplied at once, so that their sums fit the registers.
AT_ONCE = {16: (8, 4, 2, 1), 8: (2, 1), 4: (4, 2, 1)}


class Unpacking(Emitter):
    """Emits the function that unpacks numbers of ``ROWS`` interleaved rows.

    Unpacked are: bytes, four numbers of each row after another, as the tile multiplies them; then
    scales and minima, float32 [groups, 2, ROWS], of which the second are used if a group has two.
    An offset of the whole numbers is the minimum -offset * scale.
    """

    def __init__(self, module: Any, cpu: Processor, ggml_type: int) -> None:
        super().__init__(module, cpu.lanes)
        self.ggml_type, self.form = ggml_type, FORMATS[ggml_type]
        self.signed = is_signed(ggml_type, cpu)

    def unpack(self) -> Any:
        """Return ``void (blocks, groups, to)``: addresses, and how many groups, all int64."""
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        return self.function(f"unpack_{self.ggml_type}", kind, self._emit)

    def _emit(self, blocks: Any, groups: Any, to: Any) -> None:
        b, form = self.b, self.form

        def unpack(group: Any, values: list[Any]) -> list[Any]:
            at = b.mul(b.udiv(group, I64(form.numbers // GROUP)), I64(ROWS * form.size))
            block = b.add(blocks, at)
            quants = b.add(to, b.mul(group, I64(GROUP * ROWS)))
            scales = b.add(to, b.mul(group, I64(SCALES_OF_A_GROUP)))

            def some_rows(lane: Any, values: list[Any]) -> list[Any]:
                down = b.mul(lane, I64(QUARTET))
                rows = InterleavedBlocks(self, form, block, lane)
                self._rows(rows, b.add(quants, down), b.add(scales, down))
                return []

            self.loop(I64(0), I64(ROWS), self.lanes, [], some_rows)
            return []

        self.loop(I64(0), groups, form.numbers // GROUP, [], unpack)
        b.ret_void()

    def _rows(self, blocks: InterleavedBlocks, quants: Any, scales: Any) -> None:
        """Unpack a block of as many rows as a vector has lanes."""
        b, form = self.b, self.form
        for n in range(form.numbers // form.shared):
            scale, minimum = form.scale(blocks, n)
            group, which = divmod(n * form.shared, GROUP)
            at = SCALES_OF_A_GROUP * group + 4 * ROWS * (which // form.shared)
            self.store(scale, b.add(scales, I64(SCALES + at)))
            if not form.minima:
                minimum = b.fmul(scale, self.splat(-float(form.offset)))
            if not self.signed:
                self.store(minimum, b.add(scales, I64(MINIMA + at)))
        for first in range(0, form.numbers, QUARTET):
            quartet = blocks.quartet(first, flipped=not self.signed)
            self.store(quartet, b.add(quants, I64(ROWS * first)))


class BlockTile(Emitter):
    """Emits the function that multiplies ``ROWS`` interleaved rows of W by rows of x.

    Meanwhile blocks ``AHEAD`` bytes further on are read into the L2 cache: of the same rows, then
    of those that the thread multiplies next.
    """

    def __init__(self, module: Any, cpu: Processor, ggml_type: int) -> None:
        super().__init__(module, cpu.lanes)
        self.cpu, self.ggml_type, self.form = cpu, ggml_type, FORMATS[ggml_type]

    def tile(self) -> Any:
        """Return ``void (TileArguments, rows, count)``.

        There are ``rows`` rows of x, at most ``MOST_ROWS``; x_stride goes from record to record of
        one of them. y and the bias are float32; the products of ``count`` rows of W are written.
        """
        return tile_function(self, f"block_tile_{self.ggml_type}", self._emit, more=2)

    def _emit(self, given: TileArguments, rows: Any, count: Any) -> None:
        w, w_stride, x, x_stride, inputs, y, y_stride, bias, ahead = given
        b, form = self.b, self.form
        size = b.mul(w_stride, I64(ROWS))
        unpacked, totals = (
            b.ptrtoint(self._memory(n), I64) for n in (UNPACKED, 4 * ROWS * MOST_ROWS)
        )
        zero = self.splat(0.0)

        def clear(at: Any, values: list[Any]) -> list[Any]:
            self.store(zero, b.add(totals, at))
            return []

        self.loop(I64(0), b.mul(rows, I64(4 * ROWS)), 4 * self.lanes, [], clear)
        unpack = Unpacking(self.module, self.cpu, self.ggml_type).unpack()

        def add(k: Any, values: list[Any]) -> list[Any]:
            at = b.mul(b.udiv(k, I64(form.numbers)), I64(ROWS * form.size))
            left = b.udiv(b.sub(inputs, k), I64(GROUP))
            groups = b.select(b.icmp_signed("<", left, I64(GROUPS)), left, I64(GROUPS))
            b.call(unpack, [b.add(w, at), groups, unpacked])
            records = self.at(x, b.udiv(k, I64(GROUP)), x_stride)
            further = b.add(at, I64(AHEAD))
            is_here = b.icmp_signed("<", further, size)
            lines = b.select(is_here, b.add(w, further), b.add(ahead, b.sub(further, size)))
            self._multiply(records, rows, totals, unpacked, x_stride, groups, lines)
            return []

        self.loop(I64(0), inputs, CHUNK, [], add)
        self._write(totals, rows, y, y_stride, bias, count)
        b.ret_void()

    def _memory(self, size: int) -> Any:
        memory = self.b.alloca(ir.ArrayType(I8, size))
        memory.align = LINE
        return memory

    def _multiply(
        self,
        records: Any,
        rows: Any,
        totals: Any,
        unpacked: Any,
        stride: Any,
        groups: Any,
        ahead: Any,
    ) -> None:
        """Add the products of all rows of x: of as many at once as there are left."""
        b, first = self.b, I64(0)
        at_once: list[tuple[int, type[Products]]] = [(s, Products) for s in AT_ONCE[self.lanes]]
        if can_multiply(self.ggml_type, self.cpu):
            at_once.insert(0, (SIDE, AmxProducts))
        for s, kind in at_once:
            products = kind(self.module, self.cpu, self.ggml_type, s).products()
            end = b.sub(rows, b.and_(b.sub(rows, first), I64(s - 1)))

            def add(n: Any, values: list[Any], products: Any = products) -> list[Any]:
                x, to = self.at(records, n, I64(RECORD)), self.at(totals, n, I64(4 * ROWS))
                b.call(products, [unpacked, x, stride, groups, to, ahead])
                return []

            self.loop(first, end, s, [], add)
            first = end

    def _write(self, totals: Any, rows: Any, y: Any, y_stride: Any, bias: Any, count: Any) -> None:
        """Write the products, and bias if there is one, of ``count`` rows of W."""
        b = self.b
        integers = ir.VectorType(I32, self.lanes)
        number = b.trunc(count, I32)
        for lane in range(0, ROWS, self.lanes):
            lanes = ir.Constant(integers, list(range(lane, lane + self.lanes)))
            mask = b.icmp_signed("<", lanes, self.splat_bits(number))
            entry = b.block
            adding, done = b.append_basic_block("bias"), b.append_basic_block("write")
            b.cbranch(b.icmp_signed("==", bias, I64(0)), done, adding)
            b.position_at_end(adding)
            numbers = self.numbers(b.add(bias, I64(4 * lane)), FLOAT32, mask)
            b.branch(done)
            b.position_at_end(done)
            added = self.either((self.splat(-0.0), entry), (numbers, adding))

            def write(
                s: Any, values: list[Any], lane: int = lane, mask: Any = mask, added: Any = added
            ) -> list[Any]:
                at = b.add(self.at(totals, s, I64(4 * ROWS)), I64(4 * lane))
                total = b.fadd(self.load(at, self.vector), added)
                self.write(total, b.add(self.at(y, s, y_stride), I64(4 * lane)), FLOAT32, mask)
                return []

            self.loop(I64(0), rows, 1, [], write)

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
        self.ggml_type, self.format = ggml_type, FORMATS[ggml_type]
        self.signed = is_signed(ggml_type, cpu)

    def unpack(self) -> Any:
        """Return ``void (blocks, groups, to)``: addresses, and how many groups, all int64."""
        return self.function(f"unpack_{self.ggml_type}", [I64] * 3, self._emit)

    def _emit(self, blocks: Any, groups: Any, to: Any) -> None:
        b, format = self.b, self.format

        def unpack(group: Any) -> None:
            at = b.mul(b.udiv(group, I64(format.numbers // GROUP)), I64(ROWS * format.size))
            block = b.add(blocks, at)
            quants = b.add(to, b.mul(group, I64(GROUP * ROWS)))
            scales = b.add(to, b.mul(group, I64(SCALES_OF_A_GROUP)))

            def some_rows(lane: Any) -> None:
                down = b.mul(lane, I64(QUARTET))
                rows = InterleavedBlocks(self, format, block, lane)
                self._rows(rows, b.add(quants, down), b.add(scales, down))

            self.repeat(I64(ROWS), self.lanes, some_rows)

        self.repeat(groups, format.numbers // GROUP, unpack)

    def _rows(self, blocks: InterleavedBlocks, quants: Any, scales: Any) -> None:
        """Unpack a block of as many rows as a vector has lanes."""
        b, format = self.b, self.format
        for n in range(format.numbers // format.shared):
            scale, minimum = format.scale(blocks, n)
            group, first = divmod(n * format.shared, GROUP)
            at = SCALES_OF_A_GROUP * group + 4 * ROWS * (first // format.shared)
            self.store(scale, b.add(scales, I64(SCALES + at)))
            if not format.minima:
                minimum = b.fmul(scale, self.splat(-float(format.offset)))
            if not self.signed:
                self.store(minimum, b.add(scales, I64(MINIMA + at)))
        for first in range(0, format.numbers, QUARTET):
            quartet = blocks.quartet(first, flipped=not self.signed)
            self.store(quartet, b.add(quants, I64(ROWS * first)))


class BlockTile(Emitter):
    """Emits the function that multiplies ``ROWS`` interleaved rows of W by rows of x.

    Meanwhile blocks ``AHEAD`` bytes further on are read into the L2 cache: of the same rows, then
    of those that the thread multiplies next.
    """

    def __init__(self, module: Any, cpu: Processor, ggml_type: int) -> None:
        super().__init__(module, cpu.lanes)
        self.cpu, self.ggml_type, self.format = cpu, ggml_type, FORMATS[ggml_type]

    def tile(self) -> Any:
        """Return ``void (TileArguments, rows, count)``.

        There are ``rows`` rows of x, at most ``MOST_ROWS``; x_stride goes from record to record of
        one of them. y and the bias are float32; the products of ``count`` rows of W are written.
        """
        return tile_function(self, f"block_tile_{self.ggml_type}", self._emit, more=2)

    def _emit(self, given: TileArguments, rows: Any, count: Any) -> None:
        b, format = self.b, self.format
        size = b.mul(given.w_stride, I64(ROWS))
        unpacked, totals = (
            b.ptrtoint(self._memory(n), I64) for n in (UNPACKED, 4 * ROWS * MOST_ROWS)
        )
        zero = self.splat(0.0)

        clear_bytes = b.mul(rows, I64(4 * ROWS))
        self.repeat(clear_bytes, 4 * self.lanes, lambda at: self.store(zero, b.add(totals, at)))
        unpack = Unpacking(self.module, self.cpu, self.ggml_type).unpack()

        def add(k: Any) -> None:
            at = b.mul(b.udiv(k, I64(format.numbers)), I64(ROWS * format.size))
            left = b.udiv(b.sub(given.inputs, k), I64(GROUP))
            groups = b.select(b.icmp_signed("<", left, I64(GROUPS)), left, I64(GROUPS))
            b.call(unpack, [b.add(given.w, at), groups, unpacked])
            records = self.at(given.x, b.udiv(k, I64(GROUP)), given.x_stride)
            further = b.add(at, I64(AHEAD))
            is_here = b.icmp_signed("<", further, size)
            behind = b.add(given.ahead, b.sub(further, size))
            lines = b.select(is_here, b.add(given.w, further), behind)
            self._multiply(records, rows, totals, unpacked, given.x_stride, groups, lines)

        self.repeat(given.inputs, CHUNK, add)
        self._write(totals, rows, given, count)

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

            def add(n: Any, products: Any = products) -> None:
                x, to = self.at(records, n, I64(RECORD)), self.at(totals, n, I64(4 * ROWS))
                b.call(products, [unpacked, x, stride, groups, to, ahead])

            first = self.steps(first, rows, s, add)

    def _write(self, totals: Any, rows: Any, given: TileArguments, count: Any) -> None:
        """Write the products, and bias if there is one, of ``count`` rows of W."""
        b = self.b
        number = b.trunc(count, I32)
        for lane in range(0, ROWS, self.lanes):
            lanes = ir.Constant(self.integers, list(range(lane, lane + self.lanes)))
            mask = b.icmp_signed("<", lanes, self.splat_bits(number))
            added = self.bias(given.bias, 4 * lane, FLOAT32, mask)

            def write(s: Any, lane: int = lane, mask: Any = mask, added: Any = added) -> None:
                at = b.add(self.at(totals, s, I64(4 * ROWS)), I64(4 * lane))
                total = b.fadd(self.load(at, self.vector), added)
                to = b.add(self.at(given.y, s, given.y_stride), I64(4 * lane))
                self.write(total, to, FLOAT32, mask)

            self.repeat(rows, 1, write)

"""The products of ``block_tile``: unpacked rows of W times rows of x.

The products of 16 or 32 numbers are added up as whole numbers, which is exact; then one conversion
and two multiply-adds serve all lanes. Sums are float32 and are added up in an order that depends on
nothing but the number of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from skinny_kernels.block_formats import FORMATS, QUARTET, ROWS
from skinny_kernels.block_inputs import GROUP, HALF_SUMS, RECORD, SCALE, SUM
from skinny_kernels.vectors import F32, I8, I16, I32, I64, LINE, Emitter, Processor

# Numbers of a row that are unpacked at a time, and groups of them that share a scale of x.
CHUNK = 256
GROUPS = CHUNK // GROUP
# Bytes of what is unpacked (see ``block_tile.Unpacking``).
SCALES_OF_A_GROUP = 2 * 4 * ROWS
SCALES = CHUNK * ROWS
MINIMA = SCALES + GROUPS * SCALES_OF_A_GROUP
UNPACKED = MINIMA + GROUPS * SCALES_OF_A_GROUP
MOST_SUM, MOST_INPUT = 2**15 - 1, 127  # of 16-bit numbers; of rounded inputs


def is_signed(ggml_type: int, cpu: Processor) -> bool:
    """Return whether the tile multiplies weights with a sign, which have no minima then."""
    return FORMATS[ggml_type].signed and not cpu.dot_unsigned


class Dots(Emitter):
    """Emits sums of products of whole numbers of 8 bits."""

    def __init__(self, module: Any, cpu: Processor, largest: int, *, signed: bool) -> None:
        """``largest``: of the weights, which have a sign if they are ``signed``."""
        super().__init__(module, cpu.lanes)
        self.cpu, self.signed = cpu, signed
        # An operand in memory is repeated in all lanes.
        self.in_memory = bool(cpu.dot_unsigned) and cpu.lanes == 16
        # Without an instruction for 32 bits, so many sums of two products fit into 16 bits.
        self.is_narrow = not cpu.dot_unsigned and cpu.lanes > 4
        self.many = 1 if signed else MOST_SUM // (2 * MOST_INPUT * largest)

    def _dot(self, total: Any, weights: Any, inputs: Any, x: Any, offset: int) -> Any:
        """Add the products of four numbers of every row of W and of x to 32-bit numbers.

        Args:
            total: vector of 32-bit numbers.
            weights: vector of bytes, without sign.
            inputs: bytes with sign, never -128, repeated for every lane; None if ``in_memory``.
            x: address from which they are ``offset`` bytes away.
            offset: see there.
        """
        b, name = self.b, self.cpu.dot_unsigned
        if not name:
            sdot = "llvm.aarch64.neon.sdot.v4i32.v16i8"
            return self.call(sdot, self.integers, total, weights, inputs)
        words = b.bitcast(weights, total.type)
        if self.in_memory:
            kind = ir.FunctionType(total.type, [total.type, total.type, I64])
            code = f"{name} {offset}($3){{1to16}}, $2, $0"
            return b.asm(kind, code, "=v,0,v,r", [total, words, x], False)
        kind = ir.FunctionType(total.type, [total.type] * 3)
        repeated = b.bitcast(inputs, total.type)
        return b.asm(kind, f"{name} $3, $2, $0", "=v,0,v,v", [total, words, repeated], False)

    def _repeated(self, x: Any, offset: int) -> Any:
        """Return four bytes of x, repeated for every lane."""
        b = self.b
        word = self.load(b.add(x, I64(offset)), I32)
        return b.bitcast(self.splat_bits(word), ir.VectorType(I8, QUARTET * self.lanes))

    def _in_16_bits(self, quants: Any, x: Any, places: Sequence[tuple[int, Sequence[int]]]) -> Any:
        """Return sums of products of a few quartets with AVX2, whose instruction adds up pairs.

        This is assembled as it stands, because LLVM would move sums from registers to memory.

        Args:
            quants: address of the unpacked numbers.
            x: address of the records.
            places: of each quartet: offset of its ``ROWS`` rows, and of the numbers of rows of x.

        Returns:
            Vectors of 32-bit numbers, by row of x and vector of rows of W.
        """
        count, vectors = len(places[0][1]), ROWS // self.lanes
        sums = [f"${n}" for n in range(count * vectors)]
        names = iter(f"${n}" for n in range(len(sums), len(sums) + 2 * vectors + 5))
        weights, sizes = ([next(names) for _ in range(vectors)] for _ in range(2))
        repeated, pairs, at_quants, at_x, ones = names
        code = []
        for n, (rows, offsets) in enumerate(places):
            for r in range(vectors):
                code.append(f"vmovdqu {rows + QUARTET * self.lanes * r}({at_quants}), {weights[r]}")
                if self.signed:
                    code.append(f"vpabsb {weights[r]}, {sizes[r]}")
            for s, offset in enumerate(offsets):
                code.append(f"vpbroadcastd {offset}({at_x}), {repeated}")
                for r in range(vectors):
                    to = sums[s * vectors + r]
                    factor, weight = repeated, weights[r]
                    if self.signed:  # the first factor of the instruction has no sign
                        code.append(f"vpsignb {weight}, {repeated}, {pairs}")
                        factor, weight = pairs, sizes[r]
                    code.append(f"vpmaddubsw {factor}, {weight}, {pairs if n else to}")
                    if n:
                        code.append(f"vpaddw {pairs}, {to}, {to}")
        code += [f"vpmaddwd {ones}, {to}, {to}" for to in sums]
        outputs = [self.integers] * (len(sums) + 2 * vectors + 2)
        constants = ir.VectorType(I16, 2 * self.lanes)
        kind = ir.FunctionType(ir.LiteralStructType(outputs), [I64, I64, constants])
        # x: the first 16 registers, as AVX2 knows no others
        constraints = ",".join(["=&x"] * len(outputs) + ["r", "r", "x", "~{memory}"])
        given = [quants, x, ir.Constant(constants, [1] * constants.count)]
        found = self.b.asm(kind, "\n".join(code), constraints, given, True)
        return [self.b.extract_value(found, n) for n in range(len(sums))]


class Products(Dots):
    """Emits the function that multiplies unpacked rows of W by s rows of x."""

    def __init__(self, module: Any, cpu: Processor, ggml_type: int, s: int) -> None:
        self.ggml_type, self.format, self.s = ggml_type, FORMATS[ggml_type], s
        super().__init__(module, cpu, self.format.largest, signed=is_signed(ggml_type, cpu))

    def products(self) -> Any:
        """Return ``void (unpacked, records, stride, groups, totals, ahead)``, all int64.

        Adds to ``totals``, float32 [s, ROWS], the products of ``groups`` records of each row of x;
        those of the next numbers begin ``stride`` bytes after them. Meanwhile as many blocks
        ``ahead`` are read into the L2 cache: here, because unpacking leaves no time for it.
        """
        return self.function(f"products_{self.ggml_type}_{self.s}", [I64] * 6, self._emit)

    def _emit(
        self, unpacked: Any, records: Any, stride: Any, groups: Any, totals: Any, ahead: Any
    ) -> None:
        b = self.b
        places = [4 * (ROWS * s + lane) for s in range(self.s) for lane in self._lanes()]
        size = ROWS * self.format.size * GROUP // self.format.numbers  # bytes of a group's blocks
        sums = [self.load(b.add(totals, I64(place)), self.vector) for place in places]

        def add(group: Any, sums: list[Any]) -> list[Any]:
            quants = b.add(unpacked, b.mul(group, I64(GROUP * ROWS)))
            scales = b.add(unpacked, b.mul(group, I64(SCALES_OF_A_GROUP)))
            lines = b.add(ahead, b.mul(group, I64(size)))
            for line in range(0, size, LINE):
                self.prefetch(b.add(lines, I64(line)))
            return self._group(quants, scales, self.at(records, group, stride), sums)

        for place, total in zip(places, self.loop(I64(0), groups, 1, sums, add)):
            self.store(total, b.add(totals, I64(place)))

    def _lanes(self) -> range:
        """Return the first rows of vectors."""
        return range(0, ROWS, self.lanes)

    def _group(self, quants: Any, scales: Any, records: Any, totals: list[Any]) -> list[Any]:
        """Return the sums with the products of a record."""
        b, shared = self.b, self.format.shared
        wholes = [
            self._wholes(quants, range(first, first + shared, QUARTET), records)
            for first in range(0, GROUP, shared)
        ]
        added = []
        for i, total in enumerate(totals):
            s, lane = divmod(i * self.lanes, ROWS)
            part = None
            for n, of_all in enumerate(wholes):
                at = b.add(scales, I64(SCALES + 4 * (ROWS * n + lane)))
                scale, value = self.load(at, self.vector), b.sitofp(of_all[i], self.vector)
                part = b.fmul(value, scale) if part is None else self.fma(value, scale, part)
                if not self.signed:
                    minimum = self.load(b.add(at, I64(MINIMA - SCALES)), self.vector)
                    place = RECORD * s + (SUM if shared == GROUP else HALF_SUMS + 4 * n)
                    factor = self.load(b.add(records, I64(place)), F32)
                    total = self.fma(minimum, self.splat(factor), total)
            at = b.add(records, I64(RECORD * s + SCALE))
            added.append(self.fma(part, self.splat(self.load(at, F32)), total))
        return added

    def _wholes(self, quants: Any, places: range, records: Any) -> list[Any]:
        """Return the sums of the products of whole numbers, by row of x and vector of rows of W."""
        b = self.b
        sums = [self.constant(0)] * (self.s * len(self._lanes()))
        if self.is_narrow:
            given = [(ROWS * at, [RECORD * s + at for s in range(self.s)]) for at in places]
            for n in range(0, len(given), self.many):
                found = self._in_16_bits(quants, records, given[n : n + self.many])
                sums = [b.add(total, value) for total, value in zip(sums, found)]
            return sums
        byte = ir.VectorType(I8, QUARTET * self.lanes)
        for place in places:
            at = b.add(quants, I64(ROWS * place))
            rows = [self.load(b.add(at, I64(QUARTET * lane)), byte) for lane in self._lanes()]
            for s in range(self.s):
                inputs = records, RECORD * s + place
                repeated = None if self.in_memory else self._repeated(*inputs)
                for r, row in enumerate(rows):
                    i = s * len(rows) + r
                    sums[i] = self._dot(sums[i], row, repeated, *inputs)
        return sums

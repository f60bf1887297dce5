"""The block formats of GGUF files: how a kernel reads them (ggml-common.h of llama.cpp).

A row of weights is a sequence of blocks of 32 or 256 numbers. A number is ``scale * (q - offset)``
or ``scale * q + minimum``: q is a whole number of 2 to 8 bits, or what a table has for one of 4
bits; ``offset`` belongs to the format, and 16 or 32 consecutive numbers share ``scale`` and
``minimum``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from token_recycling.model.cpu.vectors import F16, F32, I8, I16, I32, I64, Emitter

Emitted = Any  # a value of LLVM


class _Part(NamedTuple):
    """Where the same bits of 16 whole numbers are: in 16 consecutive bytes of a block.

    Attributes:
        block: its number among consecutive blocks.
        offset: of the first byte.
        shift: the lowest bit in each byte.
        width: how many bits.
        to: their place in the numbers.
    """

    block: int
    offset: int
    shift: int
    width: int
    to: int = 0


@dataclass(frozen=True)
class Format:
    """A block format.

    Attributes:
        name: ggml's.
        numbers: in a block.
        size: of a block, in bytes.
        shared: consecutive numbers that have the same scale.
        halves: bytes of a block where its float16 numbers are: next to each other, at most two;
            or none.
        open: computes the scales of consecutive blocks (see ``BlockRow``).
        parts: returns where the bits of 16 numbers are, by the first of them.
        offset: subtracted from the whole numbers.
        minima: numbers are ``scale * q + minimum``.
        fifth: byte of a block where the fifth bits of its 32 numbers are, one after another.
        signed: numbers have 8 bits with a sign, and are ``scale * (q - 128)`` once it is flipped.
        table: 16 numbers of 8 bits that those of 4 bits in the blocks stand for; None: themselves.
    """

    name: str
    numbers: int
    size: int
    shared: int
    halves: tuple[int, ...]
    open: Callable[[BlockRow], None]
    parts: Callable[[int], tuple[_Part, ...]]
    offset: int = 0
    minima: bool = False
    fifth: int | None = None
    signed: bool = False
    table: tuple[int, ...] | None = None


class BlockRow:
    """Consecutive blocks of a row while the code that reads them is emitted.

    Attributes:
        emitter: emits it.
        addresses: of the blocks.
        scales: float32 vector, by ``shared`` consecutive numbers, from its number ``base`` on.
        minima: likewise, or None.
    """

    def __init__(
        self, emitter: Emitter, form: Format, addresses: Sequence[Emitted], halves: Emitted, n: int
    ) -> None:
        """Read the scales of the n-th row of ``opened``."""
        self.emitter, self.form, self.addresses = emitter, form, addresses
        self.scales: Emitted = None
        self.minima: Emitted = None
        self._halves, self._first = halves, n * len(addresses)
        form.open(self)

    @classmethod
    def opened(
        cls, emitter: Emitter, form: Format, rows: Sequence[Sequence[Emitted]]
    ) -> list[BlockRow]:
        """Return the blocks of several rows, by their addresses.

        The float16 numbers of all of them are converted at once.
        """
        b, count = emitter.b, len(form.halves)
        if not count:
            return [cls(emitter, form, row, None, n) for n, row in enumerate(rows)]
        kind = I16 if count == 1 else I32
        places = [address for row in rows for address in row]
        offset = I64(form.halves[0])
        words = [emitter.load(b.add(place, offset), kind, align=1) for place in places]
        capacity = 1 << (len(words) - 1).bit_length()
        vector = ir.Constant(ir.VectorType(kind, capacity), ir.Undefined)
        for i, word in enumerate(words):
            vector = b.insert_element(vector, word, I32(i))
        halves = b.bitcast(vector, ir.VectorType(F16, capacity * count))
        numbers = b.fpext(halves, ir.VectorType(F32, capacity * count))
        return [cls(emitter, form, row, numbers, n) for n, row in enumerate(rows)]

    def half(self, which: int, lanes: int) -> Emitted:
        """Return a vector that repeats one of the float16 numbers of a single block."""
        return self.emitter.shuffled(
            self._halves, self._halves, [self._first * len(self.form.halves) + which] * lanes
        )

    def quants(self, first: int, count: int, *, flipped: bool = True) -> Emitted:
        """Return ``count`` whole numbers of 8 bits, from number ``first`` on.

        They have no sign, unless those of a ``signed`` format are not ``flipped``.
        """
        b = self.emitter.b
        pieces = [self.form.parts(n) for n in range(first, first + count, 16)]
        quants, *others = (self._bits(parts) for parts in zip(*pieces))
        for other in others:
            quants = b.or_(quants, other)
        quants = b.bitcast(quants, ir.VectorType(I8, count))
        if self.form.fifth is not None:
            quants = b.or_(quants, self._fifth_bits(first, count))
        if self.form.table is not None:
            quants = self._looked_up(quants, self.form.table)
        if self.form.signed and flipped:
            quants = b.xor(quants, ir.Constant(quants.type, [0x80] * count))
        return quants

    def _bits(self, parts: tuple[_Part, ...]) -> Emitted:
        """Return bits of consecutive numbers at their place, four numbers in a word."""
        b = self.emitter.b
        raw = [self.load(self.at(part.block, part.offset), ir.VectorType(I32, 4)) for part in parts]
        words = self.emitter.joined(raw)
        moves = [part.shift - part.to for part in parts for _ in range(4)]
        if any(moves):
            assert min(moves) >= 0 or max(moves) <= 0
            move = b.lshr if max(moves) > 0 else b.shl
            words = move(words, ir.Constant(words.type, [abs(n) for n in moves]))
        masks = [0x01010101 * ((2**part.width - 1) << part.to) for part in parts for _ in range(4)]
        return b.and_(words, ir.Constant(words.type, masks))

    def _fifth_bits(self, first: int, count: int) -> Emitted:
        b = self.emitter.b
        assert self.form.fifth is not None
        places = [(n // 32, self.form.fifth + n % 32 // 8) for n in range(first, first + count, 16)]
        flags = self.vector([self.load(self.at(*place), I16) for place in places])
        bits = b.bitcast(flags, ir.VectorType(ir.IntType(1), count))
        wide = b.zext(bits, ir.VectorType(I8, count))
        return b.shl(wide, ir.Constant(wide.type, [4] * count))

    def _looked_up(self, places: Emitted, table: tuple[int, ...]) -> Emitted:
        """Return the numbers of a table at these places, a vector of 16, 32 or 64 bytes."""
        count = places.type.count
        names = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}
        is_neon = self.emitter.lanes == 4
        name = "llvm.aarch64.neon.tbl1.v16i8" if is_neon else f"llvm.x86.{names[count]}"
        kind = ir.FunctionType(places.type, [places.type] * 2)
        function = cgutils.get_or_insert_function(self.emitter.module, kind, name)
        numbers = ir.Constant(places.type, [n & 0xFF for n in table] * (count // len(table)))
        return self.emitter.b.call(function, [numbers, places])

    def scale(self, numbers: Sequence[int]) -> Emitted:
        """Return the scales of these numbers, counted from the first block's first."""
        if self.scales is None:
            return self._own_halves(0, numbers)
        return self._picked(self.scales, numbers)

    def minimum(self, numbers: Sequence[int]) -> Emitted:
        """Return the minima of these numbers."""
        if self.minima is None:
            return self._own_halves(1, numbers)
        return self._picked(self.minima, numbers)

    def _own_halves(self, which: int, numbers: Sequence[int]) -> Emitted:
        """Return the float16 numbers of the blocks of these numbers."""
        count = len(self.form.halves)
        picks = [(self._first + n // self.form.numbers) * count + which for n in numbers]
        return self.emitter.shuffled(self._halves, self._halves, picks)

    def _picked(self, values: Emitted, numbers: Sequence[int]) -> Emitted:
        picks = [n // self.form.shared for n in numbers]
        return self.emitter.shuffled(values, values, picks)

    def vector(self, values: Sequence[Emitted]) -> Emitted:
        """Return a vector of numbers."""
        vector = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
        for i, value in enumerate(values):
            vector = self.emitter.b.insert_element(vector, value, I32(i))
        return vector

    def at(self, n: int, offset: int) -> Emitted:
        """Return the address of a byte of a block."""
        return self.emitter.b.add(self.addresses[n], I64(offset))

    def load(self, address: Emitted, kind: Any) -> Emitted:
        """Load a value that is not aligned."""
        return self.emitter.load(address, kind, align=1)

    def wide(self, values: Emitted, *, signed: bool = False) -> Emitted:
        """Return whole numbers of 8 bits as float32."""
        b, count = self.emitter.b, values.type.count
        integer_type = ir.VectorType(I32, count)
        bits = b.sext(values, integer_type) if signed else b.zext(values, integer_type)
        return b.sitofp(bits, ir.VectorType(F32, count))

    def times(self, values: Emitted, which: int) -> Emitted:
        """Multiply a vector by a float16 number of the block."""
        return self.emitter.b.fmul(values, self.half(which, values.type.count))


# Blocks of 32 numbers: a float16 scale, perhaps a float16 minimum, perhaps fifth bits; then bytes
# whose low halves are the first 16 numbers and whose high halves are the others.


def _as_they_are(blocks: BlockRow) -> None:
    """The scales, and minima if there are some, are the float16 numbers."""


def _nibbles(offset: int) -> Callable[[int], tuple[_Part, ...]]:
    """Numbers of 4 bits from byte ``offset`` on."""
    return lambda first: (_Part(first // 32, offset, first % 32 // 16 * 4, 4),)


def _bytes(first: int) -> tuple[_Part, ...]:
    return (_Part(first // 32, 2 + first % 32, 0, 8),)


# Numbers of 4 bits that stand for those of a table.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # times 2


def _open_mxfp4(blocks: BlockRow) -> None:
    """A scale is half a power of two, whose exponent is the first byte of a block (E8M0)."""
    b = blocks.emitter.b
    raw = blocks.vector([blocks.load(blocks.at(n, 0), I8) for n in range(len(blocks.addresses))])
    exponents = b.zext(raw, ir.VectorType(I32, raw.type.count))

    def constant(number: int) -> Emitted:
        return ir.Constant(exponents.type, [number] * raw.type.count)

    # 2^-128 and 2^-127 have no exponent of their own.
    small = b.shl(constant(0x00200000), exponents)
    usual = b.shl(b.sub(exponents, constant(1)), constant(23))
    bits = b.select(b.icmp_unsigned("<", exponents, constant(2)), small, usual)
    blocks.scales = b.bitcast(bits, ir.VectorType(F32, raw.type.count))


# Blocks of 256 numbers: scales, and perhaps minima, are small whole numbers times float16 numbers
# of the block.


def _open_iq4_xs(blocks: BlockRow) -> None:
    """Eight scales of 6 bits: low bits in four bytes, the others in a word before them."""
    b = blocks.emitter.b
    high, low = blocks.load(blocks.at(0, 2), I16), blocks.load(blocks.at(0, 4), I32)
    bytes_ = ir.VectorType(I8, 4)
    halves = b.bitcast(low, bytes_)
    even = b.and_(halves, ir.Constant(bytes_, [15] * 4))
    odd = b.lshr(halves, ir.Constant(bytes_, [4] * 4))
    nibbles = blocks.emitter.shuffled(even, odd, [0, 4, 1, 5, 2, 6, 3, 7])
    words = blocks.vector([high] * 8)
    words = b.lshr(words, ir.Constant(words.type, list(range(0, 16, 2))))
    upper = b.trunc(b.and_(words, ir.Constant(words.type, [3] * 8)), nibbles.type)
    unsigned = b.or_(nibbles, b.shl(upper, ir.Constant(nibbles.type, [4] * 8)))
    signed = b.sub(unsigned, ir.Constant(unsigned.type, [32] * 8))
    blocks.scales = blocks.times(blocks.wide(signed, signed=True), 0)


def _iq4_xs(first: int) -> tuple[_Part, ...]:
    return (_Part(0, 8 + first // 32 * 16, first % 32 // 16 * 4, 4),)


def _open_q4_k(blocks: BlockRow) -> None:
    """Eight scales and eight minima of 6 bits, whose high bits are scattered over three words."""
    b = blocks.emitter.b
    words = [blocks.load(blocks.at(0, 4 + 4 * i), I32) for i in range(3)]

    def part(word: int, shift: int, mask: int) -> Emitted:
        return b.and_(b.lshr(words[word], I32(shift)), I32(mask))

    low4, low6, high2 = 0x0F0F0F0F, 0x3F3F3F3F, 0x03030303
    for name, index, half in (("scales", 0, 0), ("minima", 1, 4)):
        high = b.or_(part(2, half, low4), b.shl(part(index, 6, high2), I32(4)))
        pair = b.or_(b.zext(part(index, 0, low6), I64), b.shl(b.zext(high, I64), I64(32)))
        numbers = blocks.wide(b.bitcast(pair, ir.VectorType(I8, 8)))
        setattr(blocks, name, blocks.times(numbers, index))
    blocks.minima = b.fneg(blocks.minima)


def _q4_k(first: int) -> tuple[_Part, ...]:
    return (_Part(0, 16 + first // 64 * 32 + first % 32, first % 64 // 32 * 4, 4),)


def _q5_k(first: int) -> tuple[_Part, ...]:
    low = _Part(0, 48 + first // 64 * 32 + first % 32, first % 64 // 32 * 4, 4)
    return low, _Part(0, 16 + first % 32, first // 32, 1, 4)


def _open_q6_k(blocks: BlockRow) -> None:
    numbers = blocks.load(blocks.at(0, 192), ir.VectorType(I8, 16))
    blocks.scales = blocks.times(blocks.wide(numbers, signed=True), 0)


def _q6_k(first: int) -> tuple[_Part, ...]:
    half, n = first // 128, first % 128
    low = _Part(0, 64 * half + n % 64, n // 64 * 4, 4)
    return low, _Part(0, 128 + 32 * half + n % 32, n // 32 * 2, 2, 4)


def _open_q2_k(blocks: BlockRow) -> None:
    b = blocks.emitter.b
    raw = blocks.load(blocks.at(0, 0), ir.VectorType(I8, 16))
    low = b.and_(raw, ir.Constant(raw.type, [15] * 16))
    high = b.lshr(raw, ir.Constant(raw.type, [4] * 16))
    blocks.scales = blocks.times(blocks.wide(low), 0)
    blocks.minima = b.fneg(blocks.times(blocks.wide(high), 1))


def _q2_k(first: int) -> tuple[_Part, ...]:
    half, n = first // 128, first % 128
    return (_Part(0, 16 + 32 * half + n % 32, n // 32 * 2, 2),)


def _open_q3_k(blocks: BlockRow) -> None:
    """Sixteen scales of 6 bits: low halves in the first 8 of 12 bytes, high bits in the last 4."""
    b = blocks.emitter.b
    low = [blocks.load(blocks.at(0, 96 + 4 * i), I32) for i in range(3)]
    words = []
    for i in range(4):
        nibbles = b.and_(b.lshr(low[i % 2], I32(4 * (i // 2))), I32(0x0F0F0F0F))
        high = b.and_(b.lshr(low[2], I32(2 * i)), I32(0x03030303))
        words.append(b.or_(nibbles, b.shl(high, I32(4))))
    bytes_ = b.bitcast(blocks.vector(words), ir.VectorType(I8, 16))
    signed = b.sub(bytes_, ir.Constant(bytes_.type, [32] * 16))
    blocks.scales = blocks.times(blocks.wide(signed, signed=True), 0)


def _q3_k(first: int) -> tuple[_Part, ...]:
    half, n = first // 128, first % 128
    low = _Part(0, 32 + 32 * half + n % 32, n // 32 * 2, 2)
    return low, _Part(0, n % 32, 4 * half + n // 32, 1, 2)


# By ggml's number of the type.
FORMATS = {
    2: Format("Q4_0", 32, 18, 32, (0,), _as_they_are, _nibbles(2), offset=8),
    3: Format("Q4_1", 32, 20, 32, (0, 2), _as_they_are, _nibbles(4), minima=True),
    6: Format("Q5_0", 32, 22, 32, (0,), _as_they_are, _nibbles(6), offset=16, fifth=2),
    7: Format("Q5_1", 32, 24, 32, (0, 2), _as_they_are, _nibbles(8), minima=True, fifth=4),
    8: Format("Q8_0", 32, 34, 32, (0,), _as_they_are, _bytes, offset=128, signed=True),
    10: Format("Q2_K", 256, 84, 16, (80, 82), _open_q2_k, _q2_k, minima=True),
    11: Format("Q3_K", 256, 110, 16, (108,), _open_q3_k, _q3_k, offset=4),
    12: Format("Q4_K", 256, 144, 32, (0, 2), _open_q4_k, _q4_k, minima=True),
    13: Format("Q5_K", 256, 176, 32, (0, 2), _open_q4_k, _q5_k, minima=True),
    14: Format("Q6_K", 256, 210, 16, (208,), _open_q6_k, _q6_k, offset=32),
    20: Format(
        "IQ4_NL", 32, 18, 32, (0,), _as_they_are, _nibbles(2), 128, signed=True, table=NONLINEAR
    ),
    23: Format(
        "IQ4_XS", 256, 136, 32, (0,), _open_iq4_xs, _iq4_xs, 128, signed=True, table=NONLINEAR
    ),
    39: Format("MXFP4", 32, 17, 32, (), _open_mxfp4, _nibbles(1), 128, signed=True, table=FLOAT4),
}

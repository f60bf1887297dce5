"""The block formats of GGUF files (ggml-common.h of llama.cpp), and how kernels read them.

A row of weights is a sequence of blocks of 32 or 256 numbers. A number is ``scale * (q - offset)``
or ``scale * q + minimum``: q is a whole number of 2 to 8 bits, or what a table has for one of 4
bits; ``offset`` belongs to the format, and 16 or 32 consecutive numbers share ``scale`` and
``minimum``.

In memory, ``ROWS`` consecutive rows are interleaved: each element of a block, which is a word of
four bytes or one of the ``narrow`` ones, is followed by the same element of the other rows. So one
load has four numbers of each of as many rows as a vector has lanes, and nothing has to be added up
across lanes. There are as many bytes as in the file; rows that fill up the last ``ROWS`` are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir

from skinny_kernels.vectors import F16, I8, I16, I32, I64, Emitter

Emitted = Any  # a value of LLVM
WORDS = {1: I8, 2: I16, 4: I32}  # by bytes
ROWS = 16  # as many as the widest vectors have lanes
QUARTET = 4  # numbers of a row in a word


class Part(NamedTuple):
    """Where the same bits of four consecutive whole numbers are: in the four bytes of a word.

    Attributes:
        offset: of the word in a block.
        shift: the lowest bit in each byte.
        width: how many bits.
        to: their place in the numbers.
    """

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
        narrow: elements of a block that are no words: their offset and bytes.
        scale: returns the scale and the minimum, or None, of the n-th ``shared`` numbers.
        parts: returns where the bits of four numbers are, by the first of them.
        offset: subtracted from the whole numbers.
        minima: numbers are ``scale * q + minimum``.
        signed: numbers have 8 bits with a sign, and are ``scale * (q - 128)`` once it is flipped.
        table: 16 numbers of 8 bits that those of 4 bits in the blocks stand for; None: themselves.
        fifth: word of a block in the file where the fifth bits of its 32 numbers are, one after
            another; in memory, those of the n-th quartet are the bits n of the word's bytes.
    """

    name: str
    numbers: int
    size: int
    shared: int
    narrow: tuple[tuple[int, int], ...]
    scale: Callable[[InterleavedBlocks, int], tuple[Emitted, Emitted]]
    parts: Callable[[int], tuple[Part, ...]]
    offset: int = 0
    minima: bool = False
    signed: bool = False
    table: tuple[int, ...] | None = None
    fifth: int | None = None

    @property
    def largest(self) -> int:
        """The largest whole number."""
        if self.signed:
            return 255
        return int(sum((2**part.width - 1) << part.to for part in self.parts(0)))

    def elements(self) -> Iterator[tuple[int, int]]:
        """Yield offset and bytes of all elements of a block."""
        at, narrow = 0, dict(self.narrow)
        while at < self.size:
            size = narrow.get(at, 4)
            yield at, size
            at += size


class InterleavedBlocks:
    """Interleaved blocks of as many rows as a vector has lanes, while code to read them is emitted.

    Args of the constructor:
        emitter: emits it.
        format: their format.
        address: of the ``ROWS`` blocks.
        lane: number of the first row among them; a multiple of the lanes.
    """

    def __init__(self, emitter: Emitter, format: Format, address: Emitted, lane: Emitted) -> None:
        self.emitter, self.format, self.constant = emitter, format, emitter.constant
        b = emitter.b
        self._begin = {size: b.add(address, b.mul(lane, I64(size))) for size in (1, 2, 4)}

    def element(self, offset: int, size: int = 4) -> Emitted:
        """Return an element of every row, as a vector of whole numbers of ``size`` bytes."""
        kind = ir.VectorType(WORDS[size], self.emitter.lanes)
        address = self.emitter.b.add(self._begin[size], I64(ROWS * offset))
        return self.emitter.load(address, kind, align=size)

    def half(self, offset: int) -> Emitted:
        """Return a float16 element of every row, as float32."""
        b, vector = self.emitter.b, self.emitter.vector
        halves = b.bitcast(self.element(offset, 2), ir.VectorType(F16, vector.count))
        return b.fpext(halves, vector)

    def bits(self, word: Emitted, shift: int, width: int) -> Emitted:
        """Return some bits of every lane."""
        return self.masked(self.shifted(word, shift), 2**width - 1)

    def shifted(self, words: Emitted, count: int) -> Emitted:
        """Shift every lane to the right, or to the left if ``count`` is negative."""
        if not count:
            return words
        move = self.emitter.b.lshr if count > 0 else self.emitter.b.shl
        return move(words, self.constant(abs(count)))

    def masked(self, words: Emitted, mask: int) -> Emitted:
        """Return the bits of every lane that ``mask`` has."""
        return self.emitter.b.and_(words, self.constant(mask))

    def times(self, integers: Emitted, factor: Emitted) -> Emitted:
        """Multiply whole numbers by float32 ones."""
        b = self.emitter.b
        return b.fmul(b.sitofp(integers, self.emitter.vector), factor)

    def quartet(self, first: int, *, flipped: bool = True) -> Emitted:
        """Return four whole numbers of 8 bits of every row, from number ``first`` on.

        They have no sign, unless those of a ``signed`` format are not ``flipped``.
        """
        b, format = self.emitter.b, self.format
        words = None
        for part in format.parts(first):
            mask = 0x01010101 * ((2**part.width - 1) << part.to)
            raw = self.shifted(self.element(part.offset), part.shift - part.to)
            bits = raw if mask == 0xFFFFFFFF else self.masked(raw, mask)
            words = bits if words is None else b.or_(words, bits)
        numbers = b.bitcast(words, ir.VectorType(I8, QUARTET * self.emitter.lanes))
        flip = 0x80 if format.signed and flipped else 0
        if format.table is not None:
            return self._looked_up(numbers, [n & 0xFF ^ flip for n in format.table])
        if flip:
            numbers = b.xor(numbers, ir.Constant(numbers.type, [flip] * numbers.type.count))
        return numbers

    def _looked_up(self, places: Emitted, table: list[int]) -> Emitted:
        """Return the numbers of a table at these places, a vector of 16, 32 or 64 bytes."""
        count = places.type.count
        names = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}
        is_neon = self.emitter.lanes == 4
        name = "llvm.aarch64.neon.tbl1.v16i8" if is_neon else f"llvm.x86.{names[count]}"
        numbers = ir.Constant(places.type, table * (count // len(table)))
        return self.emitter.call(name, places.type, numbers, places)

    def numbers(self, first: int, scale: Emitted, minimum: Emitted) -> list[Emitted]:
        """Return four numbers of every row, from number ``first`` on, as float32 vectors."""
        b = self.emitter.b
        words = b.bitcast(self.quartet(first), self.emitter.integers)
        found = []
        for i in range(QUARTET):
            q = b.sub(self.bits(words, 8 * i, 8), self.constant(self.format.offset))
            value = b.sitofp(q, self.emitter.vector)
            exact = b.fmul(value, scale) if minimum is None else None
            found.append(exact or self.emitter.fma(value, scale, minimum))
        return found


# Blocks of 32 numbers: a float16 scale, perhaps a float16 minimum, perhaps fifth bits; then bytes
# whose low halves are the first 16 numbers and whose high halves are the others.


def _scale(blocks: InterleavedBlocks, n: int) -> tuple[Emitted, Emitted]:
    """The scale is a float16 number."""
    return blocks.half(0), None


def _scale_and_minimum(blocks: InterleavedBlocks, n: int) -> tuple[Emitted, Emitted]:
    """So is the minimum."""
    return blocks.half(0), blocks.half(2)


def _nibbles(offset: int, fifth: int | None = None) -> Callable[[int], tuple[Part, ...]]:
    """Numbers of 4 bits from byte ``offset`` on, and their fifth bits in a word."""

    def parts(first: int) -> tuple[Part, ...]:
        low = Part(offset + first % 16, first // 16 * 4, 4)
        return (low,) if fifth is None else (low, Part(fifth, first // QUARTET, 1, 4))

    return parts


def _bytes(first: int) -> tuple[Part, ...]:
    return (Part(2 + first, 0, 8),)


# Numbers of 4 bits that stand for those of a table.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # times 2


def _mxfp4_scale(blocks: InterleavedBlocks, n: int) -> tuple[Emitted, Emitted]:
    """A scale is half a power of two, whose exponent is the first byte of a block (E8M0)."""
    b, constant = blocks.emitter.b, blocks.constant
    exponents = b.zext(blocks.element(0, 1), blocks.emitter.integers)
    # 2^-128 and 2^-127 have no exponent of their own.
    small = b.shl(constant(0x00200000), exponents)
    usual = b.shl(b.sub(exponents, constant(1)), constant(23))
    bits = b.select(b.icmp_unsigned("<", exponents, constant(2)), small, usual)
    return b.bitcast(bits, blocks.emitter.vector), None


# Blocks of 256 numbers: scales, and perhaps minima, are small whole numbers times float16 numbers
# of the block.


def _iq4_xs_scale(blocks: InterleavedBlocks, n: int) -> tuple[Emitted, Emitted]:
    """Eight scales of 6 bits: low bits in a word, the others in two bytes before it."""
    b = blocks.emitter.b
    low = blocks.bits(blocks.element(4), 4 * n, 4)
    high = blocks.bits(b.zext(blocks.element(2, 2), blocks.emitter.integers), 2 * n, 2)
    both = b.or_(low, blocks.shifted(high, -4))
    return blocks.times(b.sub(both, blocks.constant(32)), blocks.half(0)), None


def _iq4_xs(first: int) -> tuple[Part, ...]:
    return (Part(8 + first // 32 * 16 + first % 16, first % 32 // 16 * 4, 4),)


def _q4_k_scale(blocks: InterleavedBlocks, n: int) -> tuple[Emitted, Emitted]:
    """Eight scales and eight minima of 6 bits, whose high bits are scattered over three words."""
    b, found = blocks.emitter.b, []
    for is_minimum in range(2):
        own, at = blocks.element(4 + 4 * is_minimum), 8 * (n % 4)
        number = blocks.bits(own, at, 6)
        if n >= 4:
            low = blocks.bits(blocks.element(12), at + 4 * is_minimum, 4)
            number = b.or_(low, blocks.shifted(blocks.bits(own, at + 6, 2), -4))
        found.append(blocks.times(number, blocks.half(2 * is_minimum)))
    return found[0], b.fneg(found[1])


def _q4_k(first: int) -> tuple[Part, ...]:
    return (Part(16 + first // 64 * 32 + first % 32, first % 64 // 32 * 4, 4),)


def _q5_k(first: int) -> tuple[Part, ...]:
    low = Part(48 + first // 64 * 32 + first % 32, first % 64 // 32 * 4, 4)
    return low, Part(16 + first % 32, first // 32, 1, 4)


def _q6_k_scale(blocks: InterleavedBlocks, n: int) -> tuple[Emitted, Emitted]:
    """Sixteen scales of 8 bits with a sign."""
    word = blocks.element(192 + n // 4 * 4)
    at_top = blocks.shifted(word, 8 * (n % 4) - 24)
    number = blocks.emitter.b.ashr(at_top, blocks.constant(24))
    return blocks.times(number, blocks.half(208)), None


def _q6_k(first: int) -> tuple[Part, ...]:
    half, n = first // 128, first % 128
    low = Part(64 * half + n % 64, n // 64 * 4, 4)
    return low, Part(128 + 32 * half + n % 32, n // 32 * 2, 2, 4)


def _q2_k_scale(blocks: InterleavedBlocks, n: int) -> tuple[Emitted, Emitted]:
    """Sixteen scales and sixteen minima of 4 bits, those of the same numbers in a byte."""
    word, at = blocks.element(n // 4 * 4), 8 * (n % 4)
    scale, minimum = (blocks.bits(word, at + shift, 4) for shift in (0, 4))
    minus = blocks.emitter.b.fneg(blocks.times(minimum, blocks.half(82)))
    return blocks.times(scale, blocks.half(80)), minus


def _q2_k(first: int) -> tuple[Part, ...]:
    half, n = first // 128, first % 128
    return (Part(16 + 32 * half + n % 32, n // 32 * 2, 2),)


def _q3_k_scale(blocks: InterleavedBlocks, n: int) -> tuple[Emitted, Emitted]:
    """Sixteen scales of 6 bits: low halves in the first 8 of 12 bytes, high bits in the last 4."""
    b = blocks.emitter.b
    low = blocks.bits(blocks.element(96 + n % 8 // 4 * 4), 8 * (n % 4) + n // 8 * 4, 4)
    high = blocks.bits(blocks.element(104), 8 * (n % 4) + n // 4 * 2, 2)
    both = b.or_(low, blocks.shifted(high, -4))
    return blocks.times(b.sub(both, blocks.constant(32)), blocks.half(108)), None


def _q3_k(first: int) -> tuple[Part, ...]:
    half, n = first // 128, first % 128
    low = Part(32 + 32 * half + n % 32, n // 32 * 2, 2)
    return low, Part(n % 32, 4 * half + n // 32, 1, 2)


# Elements that are no words.
ONE_HALF, TWO_HALVES = ((0, 2),), ((0, 2), (2, 2))
# By ggml's number of the type.
FORMATS = {
    2: Format("Q4_0", 32, 18, 32, ONE_HALF, _scale, _nibbles(2), offset=8),
    3: Format("Q4_1", 32, 20, 32, TWO_HALVES, _scale_and_minimum, _nibbles(4), minima=True),
    6: Format("Q5_0", 32, 22, 32, ONE_HALF, _scale, _nibbles(6, 2), offset=16, fifth=2),
    7: Format(
        "Q5_1", 32, 24, 32, TWO_HALVES, _scale_and_minimum, _nibbles(8, 4), minima=True, fifth=4
    ),
    8: Format("Q8_0", 32, 34, 32, ONE_HALF, _scale, _bytes, offset=128, signed=True),
    10: Format("Q2_K", 256, 84, 16, ((80, 2), (82, 2)), _q2_k_scale, _q2_k, minima=True),
    11: Format("Q3_K", 256, 110, 16, ((108, 2),), _q3_k_scale, _q3_k, offset=4),
    12: Format("Q4_K", 256, 144, 32, TWO_HALVES, _q4_k_scale, _q4_k, minima=True),
    13: Format("Q5_K", 256, 176, 32, TWO_HALVES, _q4_k_scale, _q5_k, minima=True),
    14: Format("Q6_K", 256, 210, 16, ((208, 2),), _q6_k_scale, _q6_k, offset=32),
    20: Format(
        "IQ4_NL", 32, 18, 32, ONE_HALF, _scale, _nibbles(2), 128, signed=True, table=NONLINEAR
    ),
    23: Format(
        "IQ4_XS", 256, 136, 32, TWO_HALVES, _iq4_xs_scale, _iq4_xs, 128, False, True, NONLINEAR
    ),
    39: Format(
        "MXFP4", 32, 17, 32, ((0, 1),), _mxfp4_scale, _nibbles(1), 128, signed=True, table=FLOAT4
    ),
}

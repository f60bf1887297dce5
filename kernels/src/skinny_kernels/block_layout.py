"""Kernels that interleave rows of blocks, and read single rows of them (see ``block_formats``)."""

from __future__ import annotations

from typing import Any

import numba

from skinny_kernels.block_formats import FORMATS, QUARTET, ROWS, WORDS, InterleavedBlocks
from skinny_kernels.intrinsics import (
    Known,
    Word,
    buffer_of,
    copy_bytes,
    emits,
    get,
    known,
    lanes,
    word_at,
)
from skinny_kernels.team_kernel import claim
from skinny_kernels.vectors import I32, I64, Emitter

# What a thread is given, all int64; numbers of rows are int64 at an address.
# Interleaving of the rows ORDER, COUNT of them, that are FROM_STRIDE bytes apart.
FROM, FROM_STRIDE, ORDER, COUNT, TO, BLOCKS = range(6)
# Reading of the rows IDS of rows that are interleaved.
TABLE, IDS, NUMBERS, TABLE_BLOCKS = range(4)
VECTORS = 256 * ROWS  # numbers of a block of every row, at most


def _rearranged(b: Any, word: Any) -> Any:
    """Emit: the fifth bits of 32 numbers in the order of memory (see ``Format``)."""
    result = I32(0)
    for n in range(8):
        quartet = b.and_(b.lshr(word, I32(QUARTET * n)), I32(15))
        # Four shifted copies, of which each byte keeps its own bit.
        spread = b.and_(b.mul(quartet, I32(0x00204081)), I32(0x01010101))
        result = b.or_(result, b.shl(spread, I32(n)))
    return result


@emits
def _interleave_block(
    emitter: Emitter, ggml_type: Known, source: Word, target: Word, row: Word
) -> None:
    """Write a block of one row between those of the others; zeros if ``source`` is 0."""
    b, format = emitter.b, FORMATS[ggml_type]
    with b.if_else(emitter.is_there(source)) as (copy, clear):
        for branch, is_copied in ((copy, True), (clear, False)):
            with branch:
                for offset, size in format.elements():
                    value = WORDS[size](0)
                    if is_copied:
                        value = emitter.load(b.add(source, I64(offset)), WORDS[size], align=1)
                        if offset == format.fifth:
                            value = _rearranged(b, value)
                    to = b.add(b.add(target, I64(ROWS * offset)), b.mul(row, I64(size)))
                    emitter.store(value, to, align=size)


@emits
def _numbers(emitter: Emitter, ggml_type: Known, address: Word, lane: Word, to: Word) -> None:
    """Write the numbers of blocks of as many rows as a vector has lanes, from ``lane`` on."""
    format = FORMATS[ggml_type]
    blocks = InterleavedBlocks(emitter, format, address, lane)
    for first in range(0, format.numbers, format.shared):
        scale, minimum = format.scale(blocks, first // format.shared)
        for n in range(first, first + format.shared, QUARTET):
            for i, vector in enumerate(blocks.numbers(n, scale, minimum)):
                emitter.store(vector, emitter.b.add(to, I64(4 * emitter.lanes * (n + i))))


_block_bytes = known(lambda ggml_type: FORMATS[ggml_type].size)
_block_numbers = known(lambda ggml_type: FORMATS[ggml_type].numbers)


@numba.njit(error_model="numpy")
def interleave(fields: Any, piece: Any, following: Any, seat: Any, ggml_type: Any) -> None:
    """Interleave ``ROWS`` rows (see ``FROM`` and so on)."""
    numba.literally(ggml_type)
    size, blocks, count = _block_bytes(ggml_type), get(fields, BLOCKS), get(fields, COUNT)
    if not claim(seat):
        return
    target = get(fields, TO) + piece * ROWS * blocks * size
    for row in range(ROWS):
        source, step = 0, 0
        if piece * ROWS + row < count:
            number = word_at(get(fields, ORDER) + 8 * (piece * ROWS + row))
            source, step = get(fields, FROM) + number * get(fields, FROM_STRIDE), size
        for block in range(blocks):
            to = target + block * ROWS * size
            _interleave_block(ggml_type, source + block * step, to, row)


@numba.njit(error_model="numpy")
def read_row(fields: Any, piece: Any, following: Any, seat: Any, ggml_type: Any) -> None:
    """Write the numbers of a row (see ``TABLE`` and so on) as float32."""
    numba.literally(ggml_type)
    size, numbers, width = _block_bytes(ggml_type), _block_numbers(ggml_type), lanes()
    blocks, row = get(fields, TABLE_BLOCKS), word_at(get(fields, IDS) + 8 * piece)
    vectors = buffer_of(VECTORS)
    if not claim(seat):
        return
    place = row % ROWS
    address = get(fields, TABLE) + row // ROWS * ROWS * blocks * size
    to = get(fields, NUMBERS) + piece * blocks * numbers * 4
    for block in range(blocks):
        at = address + block * ROWS * size
        _numbers(ggml_type, at, place // width * width, vectors)
        for n in range(numbers):
            copy_bytes(vectors + 4 * (n * width + place % width), to + 4 * (block * numbers + n), 4)

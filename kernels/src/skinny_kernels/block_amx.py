"""The products of ``block_tile`` on processors with AMX, for 16 rows of x.

One instruction multiplies all numbers of 16 rows of W that share a scale by those of 16 rows of x.
The sums are the same whole numbers as without it, so that it changes no bit.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from skinny_kernels.amx_tile import LINE, SIDE, AmxEmitter
from skinny_kernels.block_formats import FORMATS, QUARTET, ROWS
from skinny_kernels.block_inputs import GROUP, RECORD
from skinny_kernels.block_products import Products
from skinny_kernels.vectors import I8, I64, Processor

WEIGHTS, INPUTS, SUMS = range(3)  # registers


class AmxProducts(Products, AmxEmitter):
    """Emits the same function as ``Products``, for 16 rows of x and a scale for each group."""

    def _wholes(self, quants: Any, places: range, records: Any) -> list[Any]:
        b = self.b
        memory = cgutils.alloca_once(b, ir.ArrayType(I8, LINE * SIDE))
        memory.align = LINE
        sums = b.ptrtoint(memory, I64)
        self.amx("tilezero", SUMS)
        self.amx("tileloadd64", INPUTS, self.pointer(records), I64(RECORD))
        self.amx("tileloadd64", WEIGHTS, self.pointer(quants), I64(QUARTET * ROWS))
        self.amx("tdpbsud", SUMS, INPUTS, WEIGHTS)
        self.amx("tilestored64", SUMS, self.pointer(sums), I64(LINE))
        return [self.load(b.add(sums, I64(LINE * s)), self.integers) for s in range(SIDE)]


def can_multiply(ggml_type: int, cpu: Processor) -> bool:
    """Return whether AMX is faster: where 16 numbers share a scale, VNNI is."""
    return cpu.byte_tiles and FORMATS[ggml_type].shared == GROUP


# Rows and bytes of a row of the registers (see ``AmxEmitter.configure``).
SIZES = {
    WEIGHTS: (I64(GROUP // QUARTET), I64(QUARTET * ROWS)),
    INPUTS: (I64(SIDE), I64(GROUP)),
    SUMS: (I64(SIDE), I64(LINE)),
}

"""The kernel of ``packed.dequantised``: numbers of block formats as float32."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from token_recycling.model.cpu.block_formats import FORMATS, BlockRow
from token_recycling.model.cpu.team_kernel import claim
from token_recycling.model.cpu.vectors import (
    F32,
    I64,
    Emitter,
    constant,
    get,
    processor,
)

# What a thread is given, all int64; the stride of rows of blocks is in bytes.
FROM, STRIDE, TO, ROWS, SIZE = range(5)
SHARE = 16  # rows of a piece


def _row(emitter: Emitter, ggml_type: int, address: Any, to: Any, size: Any) -> None:
    """Emit: write the numbers of a row."""
    form, b, lanes = FORMATS[ggml_type], emitter.b, emitter.lanes

    def block(k: Any, values: list[Any]) -> list[Any]:
        place = emitter.at(address, b.udiv(k, I64(form.numbers)), I64(form.size))
        (blocks,) = BlockRow.opened(emitter, form, [[place]])
        for first in range(0, form.numbers, 16):
            quants = blocks.quants(first, 16)
            for n in range(0, 16, lanes):
                part = emitter.shuffled(quants, quants, range(n, n + lanes))
                integers = b.zext(part, ir.VectorType(ir.IntType(32), lanes))
                offset = ir.Constant(integers.type, [form.offset] * lanes)
                value = b.sitofp(b.sub(integers, offset), ir.VectorType(F32, lanes))
                numbers = [first + n + lane for lane in range(lanes)]
                scale = blocks.scale(numbers)
                value = (
                    emitter.fma(value, scale, blocks.minimum(numbers))
                    if form.minima
                    else b.fmul(value, scale)
                )
                emitter.store(value, emitter.at(to, b.add(k, I64(first + n)), I64(4)))
        return []

    emitter.loop(I64(0), size, form.numbers, [], block)


@intrinsic(prefer_literal=True)
def _write_row(typing: Any, ggml_type: Any, address: Any, to: Any, size: Any) -> Any:
    """Write the numbers of a row."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder.module, processor().lanes)
        emitter.b = builder
        _row(emitter, ggml_type.literal_value, *arguments[1:])
        return context.get_dummy_value()

    return types.void(constant(ggml_type), *[types.int64] * 3), generate


@numba.njit(error_model="numpy")
def dequantise(fields: Any, piece: Any, following: Any, seat: Any, ggml_type: Any) -> None:
    """Dequantise ``SHARE`` rows (see ``FROM`` and so on)."""
    numba.literally(ggml_type)
    rows, size = get(fields, ROWS), get(fields, SIZE)
    if not claim(seat):
        return
    for row in range(SHARE * piece, min(SHARE * (piece + 1), rows)):
        address = get(fields, FROM) + row * get(fields, STRIDE)
        _write_row(ggml_type, address, get(fields, TO) + 4 * row * size, size)

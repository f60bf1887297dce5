"""Inputs of the tiles for block formats: rows of x, rounded to whole numbers of 8 bits.

A row is a sequence of records of ``GROUP`` numbers that share a scale. The records of the same
numbers of all rows lie next to each other, so that a tile finds them at constant distances.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir

from skinny_kernels.intrinsics import Word, emits, get
from skinny_kernels.team_kernel import claim
from skinny_kernels.vectors import F32, FLOAT32, I8, I64, ROUND, Emitter

GROUP = 32  # inputs that share a scale
# Bytes of a record: the whole numbers; then, float32, their scale, and times that, the sums of each
# half of them, and of all.
SCALE, HALF_SUMS, SUM, RECORD = 32, 36, 44, 48
SMALLEST = 1e-30  # groups of smaller inputs are rounded to 0, so that a scale has an inverse

# What a thread is given, all int64.
FROM, TO, TOKENS, GROUPS = range(4)  # groups: of a row
SHARE = 128  # records of a piece


class Record(Emitter):
    """Emits the function that rounds the numbers of a record."""

    def record(self) -> Any:
        """Return ``void (source, target)``, both addresses, int64."""
        return self.function("record", [I64] * 2, self._emit)

    def _emit(self, source: Any, target: Any) -> None:
        b = self.b
        places = range(0, GROUP, self.lanes)
        inputs = [self.numbers(b.add(source, I64(4 * n)), FLOAT32) for n in places]
        scale, inverse = self._scale(inputs)
        self.store(scale, b.add(target, I64(SCALE)))
        sums: dict[int, Any] = {}
        for n, value in zip(places, inputs):
            shifted = self.fma(value, inverse, self.splat(ROUND))
            # The lowest byte has the sign of the whole number.
            narrow = b.trunc(b.bitcast(shifted, self.integers), ir.VectorType(I8, self.lanes))
            self.store(narrow, b.add(target, I64(n)), align=1)
            whole, half = b.sext(narrow, self.integers), n // (GROUP // 2)
            sums[half] = b.add(sums[half], whole) if half in sums else whole
        halves = [self.across(total, b.add) for total in sums.values()]
        at = [*enumerate(halves), ((SUM - HALF_SUMS) // 4, b.add(*halves))]
        for n, total in at:
            value = b.fmul(b.sitofp(total, F32), scale)
            self.store(value, b.add(target, I64(HALF_SUMS + 4 * n)))

    def _scale(self, inputs: list[Any]) -> tuple[Any, Any]:
        """Return the scale of a record, and a vector of its inverse."""
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


@emits
def _record(emitter: Emitter, source: Word, target: Word) -> None:
    """Round the numbers of a record."""
    emitter.b.call(Record(emitter.module, emitter.lanes).record(), [source, target])


@numba.njit(error_model="numpy")
def round_records(fields: Any, piece: Any, following: Any, seat: Any, dtype: Any) -> None:
    """Round ``SHARE`` records (see ``FROM`` and so on) of float32 numbers; ``dtype`` is that."""
    rows, groups = get(fields, TOKENS), get(fields, GROUPS)
    if not claim(seat):
        return
    for n in range(SHARE * piece, min(SHARE * (piece + 1), rows * groups)):
        place = n % groups * rows + n // groups
        source, target = get(fields, FROM) + 4 * GROUP * n, get(fields, TO) + RECORD * place
        _record(source, target)

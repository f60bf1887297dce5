"""The vector operations of ``attention_kernel``, as functions that numba calls.

A vector holds the same number of consecutive rows, so that no operation needs a sum across its
lanes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from skinny_kernels.activations import capped
from skinny_kernels.intrinsics import Known, Single, Word, emits
from skinny_kernels.vectors import BYTES, F32, FLOAT32, I64, Emitter

# Rows of A in a tile, by vectors of B: as many sums as the registers hold, next to those vectors.
TILES = {16: (16, 12, 8), 8: (8, 6, 4), 4: (16, 12, 8)}
MOST_VECTORS = 3
BARE, MASKED, CAPPED = range(3)  # kinds of scores that softmax takes


class Matrix(NamedTuple):
    """Float32 numbers: their address, and the bytes from row to row and from column to column.

    The columns of B and C are vectors, next to each other.
    """

    address: Any
    row: Any
    column: Any


class AttentionEmitter(Emitter):
    """Emits the functions that compute with whole vectors of rows."""

    def sums(self, r: int, v: int, size: int) -> Any:
        """Return the function that computes r rows of ``C = A B``, v vectors wide.

        ``void (a, row of a, column of a, count, b, row of b, c, row of c, ahead)``, all int64:
        addresses, and strides in bytes; ``count`` is the common dimension. Meanwhile ``count * r *
        size`` bytes from ``ahead`` on are read into the L2 cache.
        """

        def emit(
            a: Any,
            a_row: Any,
            a_column: Any,
            count: Any,
            b: Any,
            b_row: Any,
            c: Any,
            c_row: Any,
            ahead: Any,
        ) -> None:
            builder = self.b
            rows = [self.at(a, I64(i), a_row) for i in range(r)]
            bytes_of = 4 * self.lanes

            def add(k: Any, sums: list[Any]) -> list[Any]:
                self.prefetch(self.at(ahead, k, I64(r * size)))
                line = self.at(b, k, b_row)
                vectors = [
                    self.numbers(builder.add(line, I64(j * bytes_of)), FLOAT32) for j in range(v)
                ]
                updated = []
                for i in range(r):
                    factor = self.splat(self.load(self.at(rows[i], k, a_column), F32))
                    updated += [self.fma(factor, vectors[j], sums[i * v + j]) for j in range(v)]
                return updated

            products = self.loop(I64(0), count, 1, [self.splat(0.0)] * (r * v), add)
            for i in range(r):
                for j in range(v):
                    line = builder.add(self.at(c, I64(i), c_row), I64(j * bytes_of))
                    self.store(products[i * v + j], line)

        return self.function(f"sums_{r}_{v}_{size}", [I64] * 9, emit)

    def softmax(self, kind: int) -> Any:
        """Return the function that exponentiates a vector of rows in place.

        ``void (scores, row, mask, row of the mask, count, scale, cap, maximum, total)``: ``count``
        vectors, ``row`` bytes apart; scores become e^(score * scale + mask - maximum). ``CAPPED``:
        the scaled score is capped (see ``activations.capped``) before the mask is added. ``BARE``:
        neither mask nor scale nor cap is used.
        """

        def emit(
            scores: Any,
            row: Any,
            mask: Any,
            mask_row: Any,
            count: Any,
            scale: Any,
            cap: Any,
            top: Any,
            total: Any,
        ) -> None:
            b = self.b
            factor, limit = self.splat(scale), self.splat(cap)

            def add_mask(k: Any, maxima: list[Any]) -> list[Any]:
                line = self.at(scores, k, row)
                value = self.numbers(line, FLOAT32)
                if kind != BARE:
                    hidden = self.numbers(self.at(mask, k, mask_row), FLOAT32)
                    if kind == CAPPED:
                        value = b.fadd(capped(self, b.fmul(value, factor), limit), hidden)
                    else:
                        value = self.fma(value, factor, hidden)
                    self.store(value, line)
                return [b.select(b.fcmp_ordered(">", value, maxima[0]), value, maxima[0])]

            def raise_e(k: Any, sums: list[Any]) -> list[Any]:
                line = self.at(scores, k, row)
                power = self.exponential(b.fsub(self.numbers(line, FLOAT32), maximum))
                self.store(power, line)
                return [b.fadd(sums[0], power)]

            (maximum,) = self.loop(I64(0), count, 1, [self.splat(float("-inf"))], add_mask)
            (weight_sum,) = self.loop(I64(0), count, 1, [self.splat(0.0)], raise_e)
            self.store(maximum, top)
            self.store(weight_sum, total)

        return self.function(f"softmax_{kind}", [I64] * 5 + [F32] * 2 + [I64] * 2, emit)

    def weighted(self) -> Any:
        """Return ``void (weights, parts, row, part, count, out)``: out = sum of weight * part.

        For a vector of rows; weights are ``row`` bytes apart, parts ``part`` bytes.
        """

        def emit(weights: Any, parts: Any, row: Any, part: Any, count: Any, out: Any) -> None:
            def add(k: Any, sums: list[Any]) -> list[Any]:
                weight = self.numbers(self.at(weights, k, row), FLOAT32)
                return [self.fma(weight, self.numbers(self.at(parts, k, part), FLOAT32), sums[0])]

            self.store(self.loop(I64(0), count, 1, [self.splat(0.0)], add)[0], out)

        return self.function("weighted", [I64] * 6, emit)


@emits
def product(
    emitter: Emitter,
    dtype: Known,
    v: Word,
    rows: Word,
    count: Word,
    a: Matrix,
    b: Matrix,
    c: Matrix,
    ahead: Word,
    ahead_row: Word,
) -> None:
    """Compute ``C = A B`` for ``rows`` rows of A and v vectors of B (see ``sums``).

    For each row of A, ``ahead_row`` bytes of a dtype are read ahead.
    """
    builder, heights = emitter.b, TILES[emitter.lanes]
    vectors = AttentionEmitter(emitter.module, emitter.lanes, builder)

    def multiply(width: int) -> None:
        begin = I64(0)
        for r in (heights[width - 1], 1):
            tile = vectors.sums(r, width, BYTES[dtype])

            def body(n: Any, tile: Any = tile) -> None:
                at_a, at_c = emitter.at(a.address, n, a.row), emitter.at(c.address, n, c.row)
                operands = [at_a, a.row, a.column, count, b.address, b.row, at_c, c.row]
                builder.call(tile, [*operands, emitter.at(ahead, n, ahead_row)])

            begin = emitter.steps(begin, rows, r, body)

    emitter.choose(v, {width: partial(multiply, width) for width in range(1, MOST_VECTORS + 1)})


@emits
def softmax(
    emitter: Emitter,
    kind: Known,
    scores: Word,
    row: Word,
    mask: Word,
    mask_row: Word,
    count: Word,
    scale: Single,
    cap: Single,
    top: Word,
    total: Word,
) -> None:
    """See ``AttentionEmitter.softmax``."""
    function = AttentionEmitter(emitter.module, emitter.lanes).softmax(kind)
    given = [scores, row, mask, mask_row, count, scale, cap, top, total]
    emitter.b.call(function, given)


@emits
def weighted(
    emitter: Emitter, weights: Word, parts: Word, row: Word, part: Word, count: Word, out: Word
) -> None:
    """See ``AttentionEmitter.weighted``."""
    function = AttentionEmitter(emitter.module, emitter.lanes).weighted()
    emitter.b.call(function, [weights, parts, row, part, count, out])

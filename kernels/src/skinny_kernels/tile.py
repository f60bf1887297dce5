"""Tiles of ``linear_kernel``: R rows of weights times S rows of inputs, summed in registers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

from llvmlite import ir

from skinny_kernels.vectors import BFLOAT16, BYTES, F32, FLOAT32, I32, I64, Emitter, Processor


class TileArguments(NamedTuple):
    """What the function of a tile is given, all int64; strides are in bytes.

    Attributes:
        w: address of the first row of weights.
        w_stride: from row to row.
        x: address of the first row of inputs.
        x_stride: from row to row.
        inputs: numbers of a row.
        y: address of the first output.
        y_stride: from row to row of inputs.
        bias: address of the first row's, or 0.
        ahead: address of the rows of weights to read ahead.
    """

    w: Any
    w_stride: Any
    x: Any
    x_stride: Any
    inputs: Any
    y: Any
    y_stride: Any
    bias: Any
    ahead: Any


def tile_function(emitter: Emitter, name: str, emit: Callable[..., None], more: int = 0) -> Any:
    """Return the function of a tile: of ``TileArguments``, and ``more`` other int64."""
    count = len(TileArguments._fields)

    def emit_named(*values: Any) -> None:
        emit(TileArguments(*values[:count]), *values[count:])

    return emitter.function(name, [I64] * (count + more), emit_named)


class Tile(Emitter):
    """Adds up and writes the sums of a tile.

    Attributes:
        r: rows of W.
        s: rows of x.
        dtype: of y and of the bias.
    """

    r: int
    s: int
    dtype: int

    def _add_up(self, vectors: list[Any]) -> list[Any]:
        """Return the sum of the lanes of each vector.

        Pairs of vectors are folded into one, whose lanes hold partial sums of both, until a lane
        holds a whole sum: three instructions for each sum.
        """
        b, lanes = self.b, self.lanes
        # a vector, and of which of the sums its consecutive groups of ``width`` lanes are parts
        parts = [(vector, [i]) for i, vector in enumerate(vectors)]
        width = lanes
        while width > 1:
            folded = []
            for i in range(0, len(parts), 2):
                first, second = parts[i], parts[min(i + 1, len(parts) - 1)]
                low, order = _first_halves(lanes, width)
                high = [lane + width // 2 for lane in low]
                owners = first[1] + (second[1] if second is not first else [-1] * len(first[1]))
                halves = [self.shuffled(first[0], second[0], picks) for picks in (low, high)]
                folded.append((b.fadd(*halves), [owners[group] for group in order]))
            parts, width = folded, width // 2
        sums = {}
        for vector, owners in parts:
            for lane, owner in enumerate(owners):
                if owner >= 0 and owner not in sums:
                    sums[owner] = b.extract_element(vector, I32(lane))
        return [sums[i] for i in range(len(vectors))]

    def _write(self, sums: list[Any], y: Any, y_stride: Any, bias: Any) -> None:
        b, size = self.b, BYTES[self.dtype]

        def with_bias() -> list[Any]:
            at = [b.add(bias, I64(size * r)) for r in range(self.r)]
            biases = [self.number(address, self.dtype) for address in at]
            return [b.fadd(value, biases[i // self.s]) for i, value in enumerate(sums)]

        for i, total in enumerate(self.when(self.is_there(bias), sums, with_bias)):
            r, s = divmod(i, self.s)
            address = b.add(b.add(y, b.mul(y_stride, I64(s))), I64(size * r))
            self.write(total, address, self.dtype)


def _first_halves(lanes: int, width: int) -> tuple[list[int], list[int]]:
    """Choose the first halves of the groups of two vectors, for a shuffle of both.

    A group of more than four lanes crosses 128-bit lanes in any case; smaller ones are shuffled
    inside them, which is one instruction on x86.

    Returns:
        The lanes to pick (those of the second vector count from ``lanes`` on), and for each group
        of half the width in the result, the group that it comes from.
    """
    half, groups = width // 2, lanes // width
    if width > 4:
        order = list(range(2 * groups))
    else:
        inside = 4 // width  # groups in 128 bits
        order = [
            vector * groups + lane * inside + i
            for lane in range(lanes // 4)
            for vector in (0, 1)
            for i in range(inside)
        ]
    return [group * width + i for group in order for i in range(half)], order


class DenseTile(Tile):
    """Emits the function that multiplies R rows of W by S rows of x.

    Meanwhile ``ahead`` other rows of W are read into the L2 cache.
    """

    def __init__(self, module: Any, cpu: Processor, dtype: int, r: int, s: int, ahead: int) -> None:
        super().__init__(module, cpu.lanes)
        self.dtype, self.r, self.s, self.rows_ahead = dtype, r, s, ahead
        self.dots = cpu.dots(dtype)
        self.step = cpu.lanes * (2 if self.dots else 1)
        self.w_bytes = BYTES[dtype]
        self.x_bytes = 2 if self.dots else 4

    def tile(self) -> Any:
        """Return ``void (TileArguments)``; the bias has the dtype of W."""
        name = f"tile_{self.dtype}_{self.r}_{self.s}_{self.rows_ahead}"
        return tile_function(self, name, self._emit)

    def _emit(self, given: TileArguments) -> None:
        self.w = [self.at(given.w, I64(r), given.w_stride) for r in range(self.r)]
        self.x = [self.at(given.x, I64(s), given.x_stride) for s in range(self.s)]
        self.ahead = [self.at(given.ahead, I64(r), given.w_stride) for r in range(self.rows_ahead)]
        vectors_end = self.b.and_(given.inputs, I64(-self.step))
        zeros = [self.splat(0.0)] * (self.r * self.s)
        sums = self._add_up(self.loop(I64(0), vectors_end, self.step, zeros, self._vectors))
        sums = self._rest(vectors_end, given.inputs, sums)
        self._write(sums, given.y, given.y_stride, given.bias)

    def _vectors(self, k: Any, sums: list[Any]) -> list[Any]:
        """Add the products of one vector of each row."""
        b = self.b
        at_w, at_x = b.mul(k, I64(self.w_bytes)), b.mul(k, I64(self.x_bytes))
        for row in self.ahead:
            self.prefetch(b.add(row, at_w))
        ws = [self._weights(b.add(row, at_w)) for row in self.w]
        updated = list(sums)
        for s, row in enumerate(self.x):
            x = self._inputs(b.add(row, at_x))
            for r, w in enumerate(ws):
                i = r * self.s + s
                updated[i] = self._multiply_add(w, x, updated[i])
        return updated

    def _weights(self, address: Any) -> Any:
        if self.dots:
            return self.load(address, self.integers)
        return self.numbers(address, self.dtype)

    def _inputs(self, address: Any) -> Any:
        return self.load(address, self.integers if self.dots else self.vector)

    def _multiply_add(self, w: Any, x: Any, total: Any) -> Any:
        if not self.dots:
            return self.fma(w, x, total)
        kind = ir.FunctionType(self.vector, [self.vector, x.type, w.type])
        return self.b.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [total, x, w], False)

    def _rest(self, begin: Any, inputs: Any, sums: list[Any]) -> list[Any]:
        """Add the products behind the last vector, where ``inputs`` is no multiple of it."""
        b = self.b

        def with_rest() -> list[Any]:
            function = self._rest_of_a_sum()
            at_w, at_x = b.mul(begin, I64(self.w_bytes)), b.mul(begin, I64(self.x_bytes))
            count = b.sub(inputs, begin)
            return [
                b.call(function, [b.add(self.w[r], at_w), b.add(self.x[s], at_x), count, total])
                for (r, s), total in zip(product(range(self.r), range(self.s)), sums)
            ]

        return self.when(b.icmp_signed("<", begin, inputs), sums, with_rest)

    def _rest_of_a_sum(self) -> Any:
        """Return ``float (w, x, count, total)``: ``total`` and the products of count numbers."""

        def emit(w: Any, x: Any, count: Any, total: Any) -> Any:
            def add(k: Any, sums: list[Any]) -> list[Any]:
                a = self.number(self.at(w, k, I64(self.w_bytes)), self.dtype)
                dtype = BFLOAT16 if self.dots else FLOAT32
                c = self.number(self.at(x, k, I64(self.x_bytes)), dtype)
                return [self.fma(a, c, sums[0])]

            return self.loop(I64(0), count, 1, [total], add)[0]

        return self.function(f"rest_{self.dtype}", [I64, I64, I64, F32], emit, F32)

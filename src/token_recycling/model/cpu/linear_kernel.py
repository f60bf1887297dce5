"""The kernel of ``linear``: y = x W^T for 1 to 128 rows of x, compiled for this processor.

A weight matrix is far larger than the caches, so a product with few rows takes the time of reading
it once, if the arithmetic keeps up. A tile of R rows of W times S rows of x runs along their common
dimension: R + S vectors are loaded for R * S fused multiply-adds, whose sums stay in registers.
Both matrices are read as they lie in memory. Sums are added up across a vector's lanes at the end.

Every element of y is computed by one tile, in an order that depends on neither the number of
threads nor the other rows, so that these change no bit of it; the number of rows S does not either.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from token_recycling.model.cpu.vectors import (
    BFLOAT16,
    BYTES,
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    I16,
    I32,
    I64,
    Emitter,
    Processor,
    constant,
    get,
    processor,
    source,
    take,
)
from token_recycling.util.compiled import kept

# Rows of W in a tile by rows of x, so that the sums and R vectors fit the registers. Lists start
# at one row of x; the last is the largest tile.
TILES = {16: (8, 8, 6, 4, 4, 4, 3, 3), 8: (6, 4, 4, 3), 4: (8, 8, 6, 4, 4)}
STRIP = 24  # rows of W that one thread takes at a time; a multiple of every R above

# Numbers that a thread is given, all int64; the first are addresses, strides are in bytes.
X, W, Y, BIAS, ROWS, OUTPUTS, INPUTS, X_STRIDE, W_STRIDE, TAKEN = range(10)
FIELDS = 10


class _Tile(Emitter):
    """Emits the function that multiplies R rows of W by S rows of x."""

    def __init__(self, module: Any, cpu: Processor, form: int, r: int, s: int) -> None:
        super().__init__(module, cpu.lanes)
        self.form, self.r, self.s = form, r, s
        self.dots = cpu.dots(form)
        self.step = cpu.lanes * (2 if self.dots else 1)
        self.w_bytes = BYTES[form]
        self.x_bytes = 2 if self.dots else 4

    def tile(self) -> Any:
        """Return ``void (w, w_stride, x, x_stride, inputs, y, y_stride, bias)``, all int64.

        Pointers are addresses; strides are in bytes. bias is the address of float32, or 0.
        """
        kind = ir.FunctionType(ir.VoidType(), [I64] * 8)
        return self.function(f"tile_{self.form}_{self.r}_{self.s}", kind, self._emit)

    def _emit(
        self,
        w: Any,
        w_stride: Any,
        x: Any,
        x_stride: Any,
        inputs: Any,
        y: Any,
        y_stride: Any,
        bias: Any,
    ) -> None:
        b = self.b
        self.w = [self.at(w, I64(r), w_stride) for r in range(self.r)]
        self.x = [self.at(x, I64(s), x_stride) for s in range(self.s)]
        whole = b.and_(inputs, I64(-self.step))
        zeros = [self.splat(0.0)] * (self.r * self.s)
        sums = self._add_up(self.loop(I64(0), whole, self.step, zeros, self._vectors))
        sums = self._rest(whole, inputs, sums)
        self._write(sums, y, y_stride, bias)
        b.ret_void()

    def _vectors(self, k: Any, sums: list[Any]) -> list[Any]:
        """Add the products of one vector of each row."""
        b = self.b
        at_w, at_x = b.mul(k, I64(self.w_bytes)), b.mul(k, I64(self.x_bytes))
        ws = [self._weights(b.add(row, at_w)) for row in self.w]
        found = list(sums)
        for s, row in enumerate(self.x):
            x = self._inputs(b.add(row, at_x))
            for r, w in enumerate(ws):
                i = r * self.s + s
                found[i] = self._multiply_add(w, x, found[i])
        return found

    def _weights(self, address: Any) -> Any:
        if self.dots:
            return self.load(address, ir.VectorType(I32, self.lanes))
        return self.numbers(address, self.form)

    def _inputs(self, address: Any) -> Any:
        return self.load(address, ir.VectorType(I32, self.lanes) if self.dots else self.vector)

    def _multiply_add(self, w: Any, x: Any, total: Any) -> Any:
        if not self.dots:
            return self.fma(w, x, total)
        kind = ir.FunctionType(self.vector, [self.vector, x.type, w.type])
        return self.b.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [total, x, w], False)

    def _rest(self, whole: Any, inputs: Any, sums: list[Any]) -> list[Any]:
        """Add the products behind the last vector, where ``inputs`` is no multiple of it."""
        b = self.b
        entry = b.block
        rest, done = b.append_basic_block("rest"), b.append_basic_block("added")
        b.cbranch(b.icmp_signed("<", whole, inputs), rest, done)
        b.position_at_end(rest)
        function = self._rest_of_a_sum()
        at_w, at_x = b.mul(whole, I64(self.w_bytes)), b.mul(whole, I64(self.x_bytes))
        count = b.sub(inputs, whole)
        found = [
            b.call(function, [b.add(self.w[r], at_w), b.add(self.x[s], at_x), count, total])
            for (r, s), total in zip(product(range(self.r), range(self.s)), sums)
        ]
        b.branch(done)
        b.position_at_end(done)
        return [self.either((total, entry), (more, rest)) for total, more in zip(sums, found)]

    def _rest_of_a_sum(self) -> Any:
        """Return ``float (w, x, count, total)``: ``total`` and the products of count numbers."""

        def emit(w: Any, x: Any, count: Any, total: Any) -> None:
            def add(k: Any, sums: list[Any]) -> list[Any]:
                a = self.number(self.at(w, k, I64(self.w_bytes)), self.form)
                form = BFLOAT16 if self.dots else FLOAT32
                c = self.number(self.at(x, k, I64(self.x_bytes)), form)
                return [self.fma(a, c, sums[0])]

            self.b.ret(self.loop(I64(0), count, 1, [total], add)[0])

        kind = ir.FunctionType(F32, [I64, I64, I64, F32])
        return self.function(f"rest_{self.form}", kind, emit)

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
                mask = ir.VectorType(I32, lanes)
                halves = [
                    b.shuffle_vector(first[0], second[0], ir.Constant(mask, picks))
                    for picks in (low, high)
                ]
                folded.append((b.fadd(*halves), [owners[group] for group in order]))
            parts, width = folded, width // 2
        sums = {}
        for vector, owners in parts:
            for lane, owner in enumerate(owners):
                if owner >= 0 and owner not in sums:
                    sums[owner] = b.extract_element(vector, I32(lane))
        return [sums[i] for i in range(len(vectors))]

    def _write(self, sums: list[Any], y: Any, y_stride: Any, bias: Any) -> None:
        b = self.b
        entry = b.block
        adding, done = b.append_basic_block("bias"), b.append_basic_block("write")
        b.cbranch(b.icmp_signed("==", bias, I64(0)), done, adding)
        b.position_at_end(adding)
        biases = [self.load(b.add(bias, I64(4 * r)), F32) for r in range(self.r)]
        added = [b.fadd(value, biases[i // self.s]) for i, value in enumerate(sums)]
        b.branch(done)
        b.position_at_end(done)
        totals = [self.either((plain, entry), (value, adding)) for plain, value in zip(sums, added)]
        for i, total in enumerate(totals):
            r, s = divmod(i, self.s)
            address = b.add(b.add(y, b.mul(y_stride, I64(s))), I64(self.w_bytes * r))
            value = self._rounded(total)
            self.store(value, address, align=self.w_bytes)

    def _rounded(self, value: Any) -> Any:
        """Return a float32 number in the dtype of the weights."""
        b = self.b
        if self.form == FLOAT32:
            return value
        if self.form == FLOAT16:
            return b.fptrunc(value, F16)
        bits = b.bitcast(value, I32)
        odd = b.and_(b.lshr(bits, I32(16)), I32(1))
        nearest = b.lshr(b.add(bits, b.add(odd, I32(0x7FFF))), I32(16))  # ties to even
        nan = b.fcmp_unordered("uno", value, value)
        return b.trunc(b.select(nan, I32(0x7FC0), nearest), I16)


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


def _strips(builder: Any, form: int, call: Any) -> None:
    """Emit: S rows of x times the rows of W from ``begin`` to ``end``, for any S of ``TILES``."""
    cpu = processor()
    tiles = TILES[cpu.lanes]
    s = call[0]
    done = builder.append_basic_block("rows_done")
    wrong = builder.append_basic_block("no_such_tile")
    choice = builder.switch(s, wrong)
    for rows, height in enumerate(tiles, start=1):
        block = builder.append_basic_block(f"rows_{rows}")
        choice.add_case(I64(rows), block)
        builder.position_at_end(block)
        done_rows = I64(0)
        for r in dict.fromkeys((height, 1)):
            tile = _Tile(builder.module, cpu, form, r, rows).tile()
            done_rows = _each(builder, tile, done_rows, r, BYTES[form], call)
        builder.branch(done)
    builder.position_at_end(wrong)
    builder.branch(done)
    builder.position_at_end(done)


def _each(b: Any, tile: Any, begin: Any, r: int, size: int, call: Any) -> Any:
    """Emit: call ``tile`` for every r rows of W from ``begin`` on; return the first row left."""
    _, w, w_stride, x, x_stride, inputs, y, y_stride, bias, outputs = call
    entry = b.block
    head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
    b.branch(head)
    b.position_at_end(head)
    n = b.phi(I64)
    n.add_incoming(begin, entry)
    following = b.add(n, I64(r))
    b.cbranch(b.icmp_signed("<=", following, outputs), body, done)
    b.position_at_end(body)
    here = b.select(b.icmp_signed("==", bias, I64(0)), bias, b.add(bias, b.mul(n, I64(4))))
    at = b.add(w, b.mul(n, w_stride))
    to = b.add(y, b.mul(n, I64(size)))
    b.call(tile, [at, w_stride, x, x_stride, inputs, to, y_stride, here])
    n.add_incoming(following, b.block)
    b.branch(head)
    b.position_at_end(done)
    return n


@intrinsic(prefer_literal=True)
def _multiply(
    typing: Any,
    form: Any,
    s: Any,
    w: Any,
    w_stride: Any,
    x: Any,
    x_stride: Any,
    inputs: Any,
    y: Any,
    y_stride: Any,
    bias: Any,
    outputs: Any,
) -> Any:
    """Multiply s rows of x by ``outputs`` rows of W."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _strips(builder, form.literal_value, arguments[1:])
        return context.get_dummy_value()

    return types.void(constant(form), *[types.int64] * 10), generate


@intrinsic
def _most_rows(typing: Any) -> Any:
    """Return the most rows of x in a tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(len(TILES[processor().lanes]))

    return types.int64(), generate


@numba.njit(error_model="numpy")
def _work(fields: Any, form: Any) -> None:
    """Take strips of W until none is left."""
    numba.literally(form)
    x, w, y, bias = get(fields, X), get(fields, W), get(fields, Y), get(fields, BIAS)
    rows, outputs, inputs = get(fields, ROWS), get(fields, OUTPUTS), get(fields, INPUTS)
    x_stride, w_stride = get(fields, X_STRIDE), get(fields, W_STRIDE)
    size = BYTES[form]
    passes = (rows + _most_rows() - 1) // _most_rows()
    while True:
        begin = STRIP * take(fields, TAKEN)
        if begin >= outputs:
            return
        count = min(STRIP, outputs - begin)
        strip = w + begin * w_stride
        added = bias + 4 * begin if bias else 0
        for i in range(passes):  # the strip is in the cache from the second pass on
            first = rows * i // passes
            _multiply(
                form,
                rows * (i + 1) // passes - first,
                strip,
                w_stride,
                x + first * x_stride,
                x_stride,
                inputs,
                y + size * (first * outputs + begin),
                size * outputs,
                added,
                count,
            )


def compile_kernel(form: int) -> Any:
    """Return ``void (int64 *fields)`` for a dtype of weights (see ``X`` and so on).

    Machine code is kept (see ``kept``).
    """
    llvm.initialize_native_asmparser()  # for vdpbf16ps
    version = source()

    def run(fields: Any) -> None:
        if version:
            _work(fields, form)

    return kept(numba.cfunc, types.void(types.voidptr))(run)

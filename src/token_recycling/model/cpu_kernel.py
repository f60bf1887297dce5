"""The kernel of ``cpu_linear``: y = x W^T for 1 to 64 rows of x, compiled for this processor.

A weight matrix is far larger than the caches, so a product with few rows takes the time of reading
it once, if the arithmetic keeps up. A tile of R rows of W times S rows of x runs along their common
dimension: R + S vectors are loaded for R * S fused multiply-adds, whose sums stay in registers.
Both matrices are read as they lie in memory. Sums are added up across a vector's lanes at the end.

Every element of y is computed by one tile, in an order that depends on neither the number of
threads nor the other rows, so that these change no bit of it; the number of rows S does not either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from token_recycling.compiled import kept

# Weight dtypes, as numbers that numba compiles a function for.
FLOAT32, BFLOAT16, FLOAT16 = range(3)
BYTES = (4, 2, 2)

# Rows of W in a tile by rows of x, so that the sums and R vectors fit the registers. Lists start
# at one row of x; the last is the largest tile.
TILES = {16: (8, 8, 6, 4, 4, 4, 3, 3), 8: (6, 4, 4, 3), 4: (8, 8, 6, 4, 4)}
STRIP = 24  # rows of W that one thread takes at a time; a multiple of every R above

I16, I32, I64, F16, F32 = (
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)

# Fields of the call that a thread is given, all int64.
FIELDS = ("x", "w", "y", "bias", "rows", "outputs", "inputs", "x_stride", "w_stride", "taken")


@dataclass(frozen=True)
class Processor:
    """What the kernel needs to know about the processor that it is compiled for.

    Attributes:
        lanes: float32 numbers in a vector register; 0 without a fused multiply-add of vectors.
        dot_bfloat16: it multiplies pairs of bfloat16 numbers (AVX512_BF16).
    """

    lanes: int
    dot_bfloat16: bool

    @classmethod
    def of(cls, features: str) -> Processor:
        """Read LLVM's list of features, such as ``+avx2,-avx512f``."""
        has = {name[1:] for name in features.split(",") if name.startswith("+")}
        kinds = ((16, {"avx512f"}), (8, {"avx2", "fma"}), (4, {"neon"}))
        lanes = next((lanes for lanes, needed in kinds if needed <= has), 0)
        return cls(lanes, lanes == 16 and "avx512bf16" in has)

    def dots(self, form: int) -> bool:
        """Return whether inputs are read as bfloat16 too; otherwise they are float32."""
        return form == BFLOAT16 and self.dot_bfloat16


@lru_cache
def processor() -> Processor:
    """Return the processor that numba compiles for."""
    from numba.core.registry import cpu_target

    return Processor.of(cpu_target.target_context.codegen()._get_host_cpu_features())


class _Tile:
    """Builds the function that multiplies R rows of W by S rows of x."""

    def __init__(self, module: Any, cpu: Processor, form: int, r: int, s: int) -> None:
        self.cpu, self.form, self.r, self.s = cpu, form, r, s
        self.module = module
        self.dots = cpu.dots(form)
        self.step = cpu.lanes * (2 if self.dots else 1)
        self.vector = ir.VectorType(F32, cpu.lanes)
        self.w_bytes = BYTES[form]
        self.x_bytes = 2 if self.dots else 4

    def function(self) -> Any:
        """Return ``void (w, w_stride, x, x_stride, inputs, y, y_stride, bias)``, all int64.

        Pointers are addresses; strides are in bytes. bias is the address of float32, or 0.
        """
        name = f"tile_{self.form}_{self.r}_{self.s}"
        if name in self.module.globals:
            return self.module.globals[name]
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [I64] * 8), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        b = self.b = ir.IRBuilder(function.append_basic_block("entry"))
        w, w_stride, x, x_stride, inputs, y, y_stride, bias = function.args
        self.w = [b.add(w, b.mul(w_stride, I64(r))) for r in range(self.r)]
        self.x = [b.add(x, b.mul(x_stride, I64(s))) for s in range(self.s)]
        whole = b.and_(inputs, I64(-self.step))
        zeros = [ir.Constant(self.vector, [0.0] * self.cpu.lanes)] * (self.r * self.s)
        sums = self._add_up(self._loop(I64(0), whole, self.step, zeros, self._vectors))
        sums = self._rest(whole, inputs, sums)
        self._write(sums, y, y_stride, bias)
        b.ret_void()
        return function

    def _loop(self, begin: Any, end: Any, step: int, sums: list[Any], body: Any) -> list[Any]:
        """Run ``body(k, sums)`` for k in range(begin, end, step); return the last sums."""
        b = self.b
        entry = b.block
        loop, done = b.append_basic_block("loop"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed("<", begin, end), loop, done)
        b.position_at_end(loop)
        k = b.phi(I64)
        current = [b.phi(value.type) for value in sums]
        found = body(k, current)
        following = b.add(k, I64(step))
        k.add_incoming(begin, entry)
        k.add_incoming(following, b.block)
        for phi, first, value in zip(current, sums, found):
            phi.add_incoming(first, entry)
            phi.add_incoming(value, b.block)
        last = b.block
        b.cbranch(b.icmp_signed("<", following, end), loop, done)
        b.position_at_end(done)
        return [self._either((first, entry), (value, last)) for first, value in zip(sums, found)]

    def _load(self, address: Any, kind: Any) -> Any:
        element = getattr(kind, "element", kind)
        align = {I16: 2, F16: 2}.get(element, 4)
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=align)

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
        lanes, b = self.cpu.lanes, self.b
        if self.form == FLOAT32:
            return self._load(address, self.vector)
        if self.form == FLOAT16:
            return b.fpext(self._load(address, ir.VectorType(F16, lanes)), self.vector)
        if self.dots:
            return self._load(address, ir.VectorType(I32, lanes))
        wide = ir.VectorType(I32, lanes)
        bits = b.zext(self._load(address, ir.VectorType(I16, lanes)), wide)
        return b.bitcast(b.shl(bits, ir.Constant(wide, [16] * lanes)), self.vector)

    def _inputs(self, address: Any) -> Any:
        return self._load(address, ir.VectorType(I32, self.cpu.lanes) if self.dots else self.vector)

    def _multiply_add(self, w: Any, x: Any, total: Any) -> Any:
        if not self.dots:
            return self._fma(w, x, total, self.vector, f"v{self.cpu.lanes}f32")
        kind = ir.FunctionType(self.vector, [self.vector, x.type, w.type])
        return self.b.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [total, x, w], False)

    def _fma(self, a: Any, c: Any, total: Any, kind: Any, suffix: str) -> Any:
        name = f"llvm.fma.{suffix}"
        fma = cgutils.get_or_insert_function(self.module, ir.FunctionType(kind, [kind] * 3), name)
        return self.b.call(fma, [a, c, total])

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
        return [self._either((total, entry), (more, rest)) for total, more in zip(sums, found)]

    def _rest_of_a_sum(self) -> Any:
        """Return ``float (w, x, count, total)``: ``total`` and the products of count numbers."""
        name = f"rest_{self.form}"
        if name in self.module.globals:
            return self.module.globals[name]
        kind = ir.FunctionType(F32, [I64, I64, I64, F32])
        function = ir.Function(self.module, kind, name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        outer, self.b = self.b, ir.IRBuilder(function.append_basic_block("entry"))
        w, x, count, total = function.args

        def add(k: Any, sums: list[Any]) -> list[Any]:
            a = self._number(self.b.add(w, self.b.mul(k, I64(self.w_bytes))), self.form)
            form = BFLOAT16 if self.dots else FLOAT32
            c = self._number(self.b.add(x, self.b.mul(k, I64(self.x_bytes))), form)
            return [self._fma(a, c, sums[0], F32, "f32")]

        self.b.ret(self._loop(I64(0), count, 1, [total], add)[0])
        self.b = outer
        return function

    def _either(self, *values: tuple[Any, Any]) -> Any:
        """Return the value of the block that control came from."""
        phi = self.b.phi(values[0][0].type)
        for value, block in values:
            phi.add_incoming(value, block)
        return phi

    def _number(self, address: Any, form: int) -> Any:
        b = self.b
        if form == FLOAT32:
            return self._load(address, F32)
        if form == FLOAT16:
            return b.fpext(self._load(address, F16), F32)
        return b.bitcast(b.shl(b.zext(self._load(address, I16), I32), I32(16)), F32)

    def _add_up(self, vectors: list[Any]) -> list[Any]:
        """Return the sum of the lanes of each vector.

        Pairs of vectors are folded into one, whose lanes hold partial sums of both, until a lane
        holds a whole sum: three instructions for each sum.
        """
        b, lanes = self.b, self.cpu.lanes
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
        biases = [self._load(b.add(bias, I64(4 * r)), F32) for r in range(self.r)]
        added = [b.fadd(value, biases[i // self.s]) for i, value in enumerate(sums)]
        b.branch(done)
        b.position_at_end(done)
        totals = [
            self._either((plain, entry), (value, adding)) for plain, value in zip(sums, added)
        ]
        for i, total in enumerate(totals):
            r, s = divmod(i, self.s)
            address = b.add(b.add(y, b.mul(y_stride, I64(s))), I64(self.w_bytes * r))
            value = self._rounded(total)
            b.store(value, b.inttoptr(address, value.type.as_pointer()), align=self.w_bytes)

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
            tile = _Tile(builder.module, cpu, form, r, rows).function()
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

    if not isinstance(form, types.IntegerLiteral):
        raise numba.errors.RequireLiteralValue("the dtype of the weights must be a constant")
    return types.void(form, *[types.int64] * 10), generate


@intrinsic
def _most_rows(typing: Any) -> Any:
    """Return the most rows of x in a tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(len(TILES[processor().lanes]))

    return types.int64(), generate


def _place(builder: Any, pointer: Any, index: Any) -> Any:
    """Emit: the address of an int64 of an array."""
    address = builder.add(builder.ptrtoint(pointer, I64), builder.mul(index, I64(8)))
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def _take(typing: Any, pointer: Any, index: Any) -> Any:
    """Add one to an int64 of an array; return what it was. Threads do this in turn."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _place(builder, *arguments), I64(1), "monotonic")

    return types.int64(types.voidptr, types.int64), generate


@intrinsic
def _get(typing: Any, pointer: Any, index: Any) -> Any:
    """Return an int64 of an array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_place(builder, *arguments))

    return types.int64(types.voidptr, types.int64), generate


@numba.njit(error_model="numpy")
def _work(fields: Any, form: Any) -> None:
    """Take strips of W until none is left."""
    numba.literally(form)
    x, w, y, bias = _get(fields, 0), _get(fields, 1), _get(fields, 2), _get(fields, 3)
    rows, outputs, inputs = _get(fields, 4), _get(fields, 5), _get(fields, 6)
    x_stride, w_stride = _get(fields, 7), _get(fields, 8)
    size = BYTES[form]
    passes = (rows + _most_rows() - 1) // _most_rows()
    while True:
        begin = STRIP * _take(fields, 9)
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


def _float32(fields: Any) -> None:
    _work(fields, FLOAT32)


def _bfloat16(fields: Any) -> None:
    _work(fields, BFLOAT16)


def _float16(fields: Any) -> None:
    _work(fields, FLOAT16)


_FUNCTIONS = {FLOAT32: _float32, BFLOAT16: _bfloat16, FLOAT16: _float16}


def compile_kernel(form: int) -> Any:
    """Return ``void (int64 *fields)`` for a dtype of weights (see ``FIELDS``).

    Machine code is kept (see ``kept``).
    """
    llvm.initialize_native_asmparser()  # for vdpbf16ps
    return kept(numba.cfunc, types.void(types.voidptr))(_FUNCTIONS[form])

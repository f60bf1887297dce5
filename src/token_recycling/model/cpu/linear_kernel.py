"""The kernel of ``linear``: y = x W^T for 1 to 128 rows of x, compiled for this processor.

A weight matrix is far larger than the caches, so a product with few rows takes the time of reading
it once, if the arithmetic keeps up and happens meanwhile. A tile of R rows of W times S rows of x
runs along their common dimension: R + S vectors are loaded for R * S fused multiply-adds, whose
sums stay in registers. Both matrices are read as they lie in memory. Sums are added up across a
vector's lanes at the end. While a tile is computed, the rows of W that the same thread multiplies
next are read into its L2 cache.

More rows of x than the largest tile has are divided evenly into passes over a strip of W, which is
in the cache from the second one on; the next strip is then read during the first two.

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

from token_recycling.model.cpu.amx_tile import SIDE, AmxEmitter, AmxTile
from token_recycling.model.cpu.vectors import (
    BFLOAT16,
    BYTES,
    F32,
    FLOAT32,
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
# at one row of x; the last is the largest tile. In several passes, all tiles are as high as that.
TILES = {16: (8, 8, 6, 4, 4, 4, 3, 3), 8: (6, 4, 4, 3), 4: (8, 8, 6, 4, 4)}
READING_PASSES = 2  # passes during which the next strip is read
# Bytes of W in a strip, of which one is read ahead: few enough for the L2 cache of any processor,
# enough to keep reading at the end of a tile.
STRIP = 2**14
# A thread takes this share of its part of W at a time: consecutive rows, which the processor's own
# prefetcher recognises. ``docs/cpu.md`` has the times of other strips and shares.
SHARES = 10

# What a thread is given, all int64; addresses are those of the first number, strides are in bytes.
X, X_STRIDE, ROWS, INPUTS, LAYERS, GATED, THREADS, TAKEN = range(8)
# The same for each of the layers that multiply x; bias may be 0.
W, W_STRIDE, Y, BIAS, OUTPUTS = range(5)
LAYER_FIELDS = 5


def fields_of(layers: int) -> int:
    """Return the numbers that a thread is given for this many layers."""
    return TAKEN + 1 + LAYER_FIELDS * layers


class _Tile(Emitter):
    """Emits the function that multiplies R rows of W by S rows of x.

    Meanwhile ``ahead`` other rows of W are read into the L2 cache.
    """

    def __init__(self, module: Any, cpu: Processor, form: int, r: int, s: int, ahead: int) -> None:
        super().__init__(module, cpu.lanes)
        self.form, self.r, self.s, self.rows_ahead = form, r, s, ahead
        self.dots = cpu.dots(form)
        self.step = cpu.lanes * (2 if self.dots else 1)
        self.w_bytes = BYTES[form]
        self.x_bytes = 2 if self.dots else 4

    def tile(self) -> Any:
        """Return ``void (w, w_stride, x, x_stride, inputs, y, y_stride, bias, ahead)``, all int64.

        Pointers are addresses; strides are in bytes. bias is that of the dtype of W, or 0.
        """
        kind = ir.FunctionType(ir.VoidType(), [I64] * 9)
        name = f"tile_{self.form}_{self.r}_{self.s}_{self.rows_ahead}"
        return self.function(name, kind, self._emit)

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
        ahead: Any,
    ) -> None:
        b = self.b
        self.w = [self.at(w, I64(r), w_stride) for r in range(self.r)]
        self.x = [self.at(x, I64(s), x_stride) for s in range(self.s)]
        self.ahead = [self.at(ahead, I64(r), w_stride) for r in range(self.rows_ahead)]
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
        for row in self.ahead:
            self.prefetch(b.add(row, at_w))
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
        at = [b.add(bias, I64(self.w_bytes * r)) for r in range(self.r)]
        biases = [self.number(address, self.form) for address in at]
        added = [b.fadd(value, biases[i // self.s]) for i, value in enumerate(sums)]
        b.branch(done)
        b.position_at_end(done)
        totals = [self.either((plain, entry), (value, adding)) for plain, value in zip(sums, added)]
        for i, total in enumerate(totals):
            r, s = divmod(i, self.s)
            address = b.add(b.add(y, b.mul(y_stride, I64(s))), I64(self.w_bytes * r))
            self.store(self.rounded(total, self.form), address, align=self.w_bytes)


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


def _amx_tiles(builder: Any, call: Any) -> None:
    """Emit: up to 32 rows of x times a strip of W (see ``_multiply``)."""
    passes, n, *strip = call
    full = builder.icmp_signed(">", n, I64(SIDE))
    several = builder.icmp_signed(">", passes, I64(1))
    width = builder.select(builder.or_(several, full), I64(SIDE), n)
    done = builder.append_basic_block("strip_done")
    one, two = builder.append_basic_block("one"), builder.append_basic_block("two")
    builder.cbranch(full, two, one)
    for s, block in enumerate((one, two), start=1):
        builder.position_at_end(block)
        begin = I64(0)
        for r in (2, 1):
            tile = AmxTile(builder.module, r, s).tile()
            begin = _each(builder, tile, begin, SIDE * r, BYTES[BFLOAT16], strip, n, width)
        builder.branch(done)
    builder.position_at_end(done)


def _tiles(builder: Any, form: int, call: Any) -> None:
    """Emit: S rows of x times a strip of W, for any S of ``TILES`` (see ``_multiply``)."""
    cpu = processor()
    heights = TILES[cpu.lanes]
    most, last = len(heights), heights[-1]
    passes, s, *strip = call
    done = builder.append_basic_block("strip_done")
    wrong = builder.append_basic_block("no_such_tile")
    # One pass: by S; one of several passes: by -S
    alone = builder.icmp_signed("==", passes, I64(1))
    choice = builder.switch(builder.select(alone, s, builder.neg(s)), wrong)
    several = [(-n, last, -(-last // READING_PASSES)) for n in range((most + 1) // 2, most + 1)]
    for key, height, ahead in [*((n, r, r) for n, r in enumerate(heights, start=1)), *several]:
        block = builder.append_basic_block(f"rows_{key}")
        choice.add_case(I64(key), block)
        builder.position_at_end(block)
        begin = I64(0)
        for r in dict.fromkeys((height, 1)):
            tile = _Tile(builder.module, cpu, form, r, abs(key), min(r, ahead)).tile()
            begin = _each(builder, tile, begin, r, BYTES[form], strip)
        builder.branch(done)
    builder.position_at_end(wrong)
    builder.branch(done)
    builder.position_at_end(done)


def _each(b: Any, tile: Any, begin: Any, r: int, size: int, strip: Any, *more: Any) -> Any:
    """Emit: call ``tile`` for every r rows of W from ``begin`` on; return the first row left.

    ``more`` are further arguments of ``tile``.
    """
    w, w_stride, x, x_stride, inputs, y, y_stride, bias, outputs, ahead = strip
    entry = b.block
    head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
    b.branch(head)
    b.position_at_end(head)
    n = b.phi(I64)
    n.add_incoming(begin, entry)
    following = b.add(n, I64(r))
    b.cbranch(b.icmp_signed("<=", following, outputs), body, done)
    b.position_at_end(body)
    down, along = b.mul(n, w_stride), b.mul(n, I64(size))
    bias_here = b.select(b.icmp_signed("==", bias, I64(0)), bias, b.add(bias, along))
    to, fetched = b.add(y, along), b.add(ahead, down)
    multiplied = [b.add(w, down), w_stride, x, x_stride, inputs]
    b.call(tile, [*multiplied, to, y_stride, bias_here, fetched, *more])
    n.add_incoming(following, b.block)
    b.branch(head)
    b.position_at_end(done)
    return n


@intrinsic(prefer_literal=True)
def _multiply(
    typing: Any,
    form: Any,
    amx: Any,
    passes: Any,
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
    ahead: Any,
) -> Any:
    """Multiply s rows of x by ``outputs`` rows of W, in one of so many passes over these."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if amx.literal_value:
            _amx_tiles(builder, arguments[2:])
        else:
            _tiles(builder, form.literal_value, arguments[2:])
        return context.get_dummy_value()

    return types.void(constant(form), constant(amx), *[types.int64] * 12), generate


@intrinsic(prefer_literal=True)
def _configure(typing: Any, amx: Any, rows: Any) -> Any:
    """Set this thread's tile registers for so many rows of x."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if amx.literal_value:
            emitter = AmxEmitter(builder.module)
            emitter.b = builder
            emitter.configure(arguments[1])
        return context.get_dummy_value()

    return types.void(constant(amx), types.int64), generate


@intrinsic(prefer_literal=True)
def _release(typing: Any, amx: Any) -> Any:
    """Give the tile registers back."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if amx.literal_value:
            emitter = AmxEmitter(builder.module)
            emitter.b = builder
            emitter.amx("tilerelease")
        return context.get_dummy_value()

    return types.void(constant(amx)), generate


@intrinsic(prefer_literal=True)
def _gate(typing: Any, form: Any, gate: Any, up: Any, count: Any) -> Any:
    """Replace ``count`` numbers g by silu(g) * up, rounded where PyTorch rounds.

    With t = e^-|g|, silu(g) = g / (1 + t) for g >= 0, else g t / (1 + t).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, emitter = form.literal_value, Emitter(builder.module, processor().lanes)
        emitter.b = b = builder
        size, one, zero = I64(BYTES[kind]), emitter.splat(1.0), emitter.splat(0.0)

        def body(k: Any, mask: Any, values: list[Any]) -> list[Any]:
            at = emitter.at(arguments[1], k, size)
            g = emitter.numbers(at, kind, mask)
            other = emitter.numbers(emitter.at(arguments[2], k, size), kind, mask)
            negative = b.fcmp_ordered("<", g, zero)
            t = emitter.exponential(b.select(negative, g, b.fsub(zero, g)))
            above = b.fmul(g, b.select(negative, t, one))
            silu = emitter.through(b.fdiv(above, b.fadd(one, t)), kind)
            emitter.write(b.fmul(silu, other), at, kind, mask)
            return []

        emitter.vectors(arguments[3], [], body)
        return context.get_dummy_value()

    return types.void(constant(form), *[types.int64] * 3), generate


@intrinsic
def _largest(typing: Any) -> Any:
    """Return the rows of x in the largest tile."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(len(TILES[processor().lanes]))

    return types.int64(), generate


@intrinsic
def _height(typing: Any, rows: Any) -> Any:
    """Return the rows of W in the tiles for this many rows of x."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        heights = TILES[processor().lanes]
        found = I64(heights[-1])
        for s, height in enumerate(heights, start=1):
            is_s = builder.icmp_signed("==", arguments[0], I64(s))
            found = builder.select(is_s, I64(height), found)
        return found

    return types.int64(types.int64), generate


@numba.njit(error_model="numpy")
def _field(fields: Any, layer: Any, name: Any) -> Any:
    """Return a number of one of the layers."""
    return get(fields, TAKEN + 1 + LAYER_FIELDS * layer + name)


@numba.njit(error_model="numpy")
def _piece(fields: Any, number: Any, share: Any) -> tuple[Any, Any, Any]:
    """Return the layer of a piece of work, and its first row of W and the one behind its last.

    Pieces are ``share`` rows high. Those of gated layers alternate; others follow each other. The
    layer is ``LAYERS`` behind the last piece.
    """
    layers = get(fields, LAYERS)
    layer = 0
    if get(fields, GATED):
        layer, number = number % 2, number // 2
        if number * share >= _field(fields, 0, OUTPUTS):
            layer = layers
    else:
        while layer < layers and number * share >= _field(fields, layer, OUTPUTS):
            number -= (_field(fields, layer, OUTPUTS) + share - 1) // share
            layer += 1
    if layer == layers:
        return layer, 0, 0
    return layer, number * share, min((number + 1) * share, _field(fields, layer, OUTPUTS))


@numba.njit(error_model="numpy")
def _address(fields: Any, layer: Any, row: Any) -> Any:
    """Return the address of a row of a layer's W."""
    return _field(fields, layer, W) + row * _field(fields, layer, W_STRIDE)


@numba.njit(error_model="numpy")
def _work(fields: Any, form: Any, amx: Any) -> None:
    """Take pieces of the layers until none is left."""
    numba.literally(form)
    numba.literally(amx)
    x, x_stride, rows, inputs = (
        get(fields, X),
        get(fields, X_STRIDE),
        get(fields, ROWS),
        get(fields, INPUTS),
    )
    layers, gated, size = get(fields, LAYERS), get(fields, GATED), BYTES[form]
    most = 2 * SIDE if amx else _largest()  # rows of x in a pass
    passes = (rows + most - 1) // most
    height = 2 * SIDE if amx else _height(rows)
    reading_passes = 1 if amx else READING_PASSES
    _configure(amx, min(rows, SIDE))
    strip = height * max(1, STRIP // (height * inputs * size))
    outputs = 0
    for layer in range(layers):
        outputs += _field(fields, layer, OUTPUTS)
    share = strip * max(1, outputs // (SHARES * get(fields, THREADS) * strip))
    together = 2 if gated else 1  # pieces that a thread takes at a time
    number = together * take(fields, TAKEN)
    layer, begin, end = _piece(fields, number, share)
    while layer < layers:
        following = number + 1
        if following % together == 0:
            following = together * take(fields, TAKEN)
        next_layer, next_begin, next_end = _piece(fields, following, share)
        w_stride, y, bias = (
            _field(fields, layer, W_STRIDE),
            _field(fields, layer, Y),
            _field(fields, layer, BIAS),
        )
        y_stride = size * _field(fields, layer, OUTPUTS)
        for row in range(begin, end, strip):
            count = min(strip, end - row)
            here = _address(fields, layer, row)
            ahead = here  # reads again what is in the cache: nothing follows
            if row + count < end:
                ahead = here + count * w_stride
            elif next_layer < layers:
                ahead = _address(fields, next_layer, next_begin)
            for i in range(passes):
                first = most * i if amx else rows * i // passes
                last = min(first + most, rows) if amx else rows * (i + 1) // passes
                part = i * ((height + reading_passes - 1) // reading_passes) * w_stride
                _multiply(
                    form,
                    amx,
                    passes,
                    last - first,
                    here,
                    w_stride,
                    x + first * x_stride,
                    x_stride,
                    inputs,
                    y + first * y_stride + size * row,
                    y_stride,
                    bias + size * row if bias else 0,
                    count,
                    ahead + part if i < reading_passes else here,
                )
        if gated and layer == 1:
            for i in range(rows):
                at = i * y_stride + size * begin
                _gate(form, _field(fields, 0, Y) + at, y + at, end - begin)
        number, layer, begin, end = following, next_layer, next_begin, next_end
    _release(amx)


def compile_kernel(form: int, amx: int) -> Any:
    """Return ``void (int64 *fields)`` for a dtype of weights (see ``X`` and so on).

    Args:
        form: the dtype.
        amx: 1 for tiles of AMX, which multiply bfloat16 layers of a multiple of 32 inputs and of 16
            outputs; else 0. X is interleaved for them.

    Machine code is kept (see ``kept``).
    """
    llvm.initialize_native_asmparser()  # for vdpbf16ps
    version = source()

    def run(fields: Any) -> None:
        if version:
            _work(fields, form, amx)

    return kept(numba.cfunc, types.void(types.voidptr))(run)

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

from collections.abc import Sequence
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from skinny_kernels import amx_tile, block_amx
from skinny_kernels.activations import GELU, GELU_TANH, SILU, gate
from skinny_kernels.amx_tile import SIDE, AmxEmitter, AmxTile
from skinny_kernels.attention_vectors import buffer_of
from skinny_kernels.block_formats import ROWS as INTERLEAVED
from skinny_kernels.block_inputs import RECORD
from skinny_kernels.block_tile import MOST_ROWS, BlockTile
from skinny_kernels.team_kernel import claim
from skinny_kernels.tile import DenseTile
from skinny_kernels.vectors import (
    BFLOAT16,
    BYTES,
    FLOAT32,
    I64,
    Emitter,
    constant,
    copy_bytes,
    get,
    known,
    processor,
)

# How W is multiplied is a number: one of the dtypes of dense weights (see ``vectors``), ``AMX`` for
# bfloat16 by tiles of AMX, or for GGUF ``BLOCKS`` plus ggml's number of the block format.
AMX, BLOCKS = 3, 16
# Rows of W in a tile by rows of x, so that the sums and R vectors fit the registers. Lists start
# at one row of x; the last is the largest tile. In several passes, all tiles are as high as that.
TILES = {16: (8, 8, 6, 4, 4, 4, 3, 3), 8: (6, 4, 4, 3), 4: (8, 8, 6, 4, 4)}
READING_PASSES = 2  # passes during which the next strip of dense weights is read
# Bytes of W in a strip, of which one is read ahead: few enough for the L2 cache of any processor,
# enough to keep reading at the end of a tile.
STRIP = 2**14
# A piece is this share of a thread's part of W: consecutive rows, which the processor's own
# prefetcher recognises. It has no more than ``PIECE`` bytes, and its outputs no more than
# ``BUFFER``.
SHARES = 10
PIECE, BUFFER = 2**19, 2**16
BUFFER_FLOATS = BUFFER // 4

# Fields of a launch, all int64; addresses are those of the first number, strides are in bytes.
X, X_STRIDE, ROWS, INPUTS, LAYERS, GATED, HEIGHT, STRIP_ROWS, SHARE = range(9)
# The same for each of the layers that multiply x; bias may be 0.
W, W_STRIDE, Y, BIAS, OUTPUTS = range(5)
COMMON_FIELDS, LAYER_FIELDS = 9, 5


def fields_of(layers: int) -> int:
    """Return how many fields a launch has for this many layers."""
    return COMMON_FIELDS + LAYER_FIELDS * layers


def shares(
    form: int, rows: int, w_stride: int, outputs: Sequence[int], threads: int, gated: int
) -> tuple[int, int, int, int]:
    """Divide layers into pieces.

    Args:
        form: how W is multiplied.
        rows: of x.
        w_stride: bytes from row to row of W.
        outputs: rows of W of each layer.
        threads: that are to share the work.
        gated: an activation, for pieces that have the same rows of both layers; or ``NOT_GATED``.

    Returns:
        Rows of W in a tile, in a strip and in a piece, and the number of pieces.
    """
    height = _height(form, rows)
    strip = height * max(1, STRIP // (height * w_stride))
    most = min(PIECE // w_stride, BUFFER // (rows * BYTES[_output(form)] * (2 if gated else 1)))
    count = max(1, min(sum(outputs) // (SHARES * threads), most) // strip)
    share = strip * count
    return height, strip, share, sum(-(-n // share) for n in (outputs[:1] if gated else outputs))


def _height(form: int, rows: int) -> int:
    """Return the rows of W in a tile for so many rows of x, of which a strip is a multiple."""
    if form >= BLOCKS:
        return INTERLEAVED
    heights = TILES[processor().lanes]
    return 2 * SIDE if form == AMX else heights[min(rows, len(heights)) - 1]


def _most_rows(form: int) -> int:
    """Return the rows of x in the largest tile."""
    if form >= BLOCKS:
        return MOST_ROWS
    return 2 * SIDE if form == AMX else len(TILES[processor().lanes])


def _output(form: int) -> int:
    """Return the dtype of the outputs and biases."""
    return FLOAT32 if form >= BLOCKS else BFLOAT16 if form == AMX else form


_gate = gate(_output)


def _amx_tiles(builder: Any, call: Any) -> None:
    """Emit: up to 32 rows of x times a strip of W (see ``_multiply``)."""
    passes, n, *strip = call
    full = builder.icmp_signed(">", n, I64(SIDE))
    several = builder.icmp_signed(">", passes, I64(1))
    width = builder.select(builder.or_(several, full), I64(SIDE), n)
    done = builder.append_basic_block("strip_done")
    one_tile, two_tiles = builder.append_basic_block("one"), builder.append_basic_block("two")
    builder.cbranch(full, two_tiles, one_tile)
    for s, block in enumerate((one_tile, two_tiles), start=1):
        builder.position_at_end(block)
        begin = I64(0)
        for r in (2, 1):
            tile = AmxTile(builder.module, r, s).tile()
            begin = _each(builder, tile, begin, SIDE * r, BYTES[BFLOAT16], strip, n, width)
        builder.branch(done)
    builder.position_at_end(done)


def _block_tiles(b: Any, form: int, call: Any) -> None:
    """Emit: S rows of x times a strip of W in a block format (see ``_multiply``)."""
    _, s, w, w_stride, x, x_stride, inputs, y, y_stride, bias, outputs, ahead = call
    tile = BlockTile(b.module, processor().for_blocks(), form - BLOCKS).tile()
    emitter = Emitter(b.module, INTERLEAVED)
    emitter.b = b

    def multiply(n: Any, values: list[Any]) -> list[Any]:
        down, along = b.mul(n, w_stride), b.mul(n, I64(BYTES[FLOAT32]))
        bias_here = b.select(b.icmp_signed("==", bias, I64(0)), bias, b.add(bias, along))
        multiplied = [b.add(w, down), w_stride, x, x_stride, inputs]
        left = b.sub(outputs, n)
        following = b.add(b.add(w, down), b.mul(w_stride, I64(INTERLEAVED)))
        is_last = b.icmp_signed("<=", left, I64(INTERLEAVED))
        next_rows = b.select(is_last, ahead, following)
        b.call(tile, [*multiplied, b.add(y, along), y_stride, bias_here, next_rows, s, left])
        return []

    emitter.loop(I64(0), outputs, INTERLEAVED, [], multiply)


def _tiles(builder: Any, form: int, call: Any) -> None:
    """Emit: S rows of x times a strip of W, for any S (see ``_multiply``)."""
    heights = TILES[processor().lanes]
    max_rows, last = len(heights), heights[-1]
    passes, s, *strip = call
    done = builder.append_basic_block("strip_done")
    wrong = builder.append_basic_block("no_such_tile")
    # One pass: by S; one of several passes: by -S
    alone = builder.icmp_signed("==", passes, I64(1))
    choice = builder.switch(builder.select(alone, s, builder.neg(s)), wrong)
    several = [
        (-n, last, -(-last // READING_PASSES)) for n in range((max_rows + 1) // 2, max_rows + 1)
    ]
    for key, height, ahead in [*((n, r, r) for n, r in enumerate(heights, start=1)), *several]:
        block = builder.append_basic_block(f"rows_{key}")
        choice.add_case(I64(key), block)
        builder.position_at_end(block)
        begin = I64(0)
        for r in dict.fromkeys((height, 1)):
            rows_ahead = min(r, ahead)
            tile = DenseTile(builder.module, processor(), form, r, abs(key), rows_ahead).tile()
            begin = _each(builder, tile, begin, r, BYTES[_output(form)], strip)
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
        if form.literal_value == AMX:
            _amx_tiles(builder, arguments[1:])
        elif form.literal_value >= BLOCKS:
            _block_tiles(builder, form.literal_value, arguments[1:])
        else:
            _tiles(builder, form.literal_value, arguments[1:])
        return context.get_dummy_value()

    return types.void(constant(form), *[types.int64] * 12), generate


@intrinsic(prefer_literal=True)
def _configure(typing: Any, form: Any, rows: Any) -> Any:
    """Set this thread's registers of AMX for so many rows of x."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = form.literal_value
        emitter = AmxEmitter(builder.module, SIDE)
        emitter.b = builder
        if number == AMX:
            emitter.configure(amx_tile.sizes(builder, arguments[1]))
        elif number >= BLOCKS and block_amx.can_multiply(number - BLOCKS, processor()):
            emitter.configure(block_amx.SIZES)
        return context.get_dummy_value()

    return types.void(constant(form), types.int64), generate


@intrinsic(prefer_literal=True)
def _release(typing: Any, form: Any) -> Any:
    """Give the registers of AMX back."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = form.literal_value
        of_bytes = number >= BLOCKS and block_amx.can_multiply(number - BLOCKS, processor())
        if number == AMX or of_bytes:
            emitter = AmxEmitter(builder.module, SIDE)
            emitter.b = builder
            emitter.amx("tilerelease")
        return context.get_dummy_value()

    return types.void(constant(form)), generate


_output_bytes = known(lambda form: BYTES[_output(form)])
_largest = known(_most_rows)
_is_amx = known(lambda form: int(form == AMX))
_is_blocks = known(lambda form: int(form >= BLOCKS))


@numba.njit(error_model="numpy")
def _field(fields: Any, layer: Any, name: Any) -> Any:
    """Return a number of one of the layers."""
    return get(fields, COMMON_FIELDS + LAYER_FIELDS * layer + name)


@numba.njit(error_model="numpy")
def _rows(fields: Any, piece: Any) -> tuple[Any, Any, Any]:
    """Return the layer of a piece, and its first row of W and the one behind its last.

    The layer is ``LAYERS`` behind the last piece.
    """
    layers, share = get(fields, LAYERS), get(fields, SHARE)
    count = 1 if get(fields, GATED) else layers
    layer = 0
    while layer < count and piece * share >= _field(fields, layer, OUTPUTS):
        piece -= (_field(fields, layer, OUTPUTS) + share - 1) // share
        layer += 1
    if layer == count:
        return layers, 0, 0
    return layer, piece * share, min((piece + 1) * share, _field(fields, layer, OUTPUTS))


@numba.njit(error_model="numpy")
def _address(fields: Any, layer: Any, row: Any) -> Any:
    """Return the address of a row of a layer's W."""
    return _field(fields, layer, W) + row * _field(fields, layer, W_STRIDE)


@numba.njit(error_model="numpy")
def _strips(
    fields: Any, form: Any, layer: Any, begin: Any, end: Any, y: Any, y_stride: Any, behind: Any
) -> None:
    """Multiply x by rows of a layer's W.

    Args:
        fields: see ``multiply``.
        form: likewise.
        layer: number of the layer.
        begin: first row.
        end: the one behind the last row.
        y: address of the first output.
        y_stride: bytes from row to row of outputs.
        behind: address of the rows that this thread multiplies next; 0: not known.
    """
    x, x_stride, rows, inputs, strip = (
        get(fields, X),
        get(fields, X_STRIDE),
        get(fields, ROWS),
        get(fields, INPUTS),
        get(fields, STRIP_ROWS),
    )
    size, w_stride, bias = (
        _output_bytes(form),
        _field(fields, layer, W_STRIDE),
        _field(fields, layer, BIAS),
    )
    amx, max_rows, height = _is_amx(form), _largest(form), get(fields, HEIGHT)
    passes = (rows + max_rows - 1) // max_rows
    reading_passes = 1 if amx or _is_blocks(form) else READING_PASSES
    # From row to row of x: the records of a row are not next to each other.
    x_step = RECORD if _is_blocks(form) else x_stride
    for row in range(begin, end, strip):
        count = min(strip, end - row)
        here = _address(fields, layer, row)
        ahead = here  # reads again what is in the cache: nothing follows
        if row + count < end:
            ahead = here + count * w_stride
        elif behind:
            ahead = behind
        for i in range(passes):
            first = max_rows * i if amx else rows * i // passes
            last = min(first + max_rows, rows) if amx else rows * (i + 1) // passes
            part = i * ((height + reading_passes - 1) // reading_passes) * w_stride
            _multiply(
                form,
                passes,
                last - first,
                here,
                w_stride,
                x + first * x_step,
                x_stride,
                inputs,
                y + first * y_stride + size * (row - begin),
                y_stride,
                bias + size * row if bias else 0,
                count,
                ahead + part if i < reading_passes else here,
            )


@numba.njit(error_model="numpy")
def multiply(fields: Any, piece: Any, following: Any, seat: Any, form: Any) -> None:
    """Compute a piece of the layers (see ``X`` and so on, and ``shares``).

    Args:
        fields: int64.
        piece: number of the piece.
        following: of the one that this thread computes next.
        seat: to claim the piece.
        form: a dtype of dense weights; or ``AMX``, for layers of a multiple of 32 inputs and of 16
            outputs, where x is interleaved; or ``BLOCKS`` + ggml's number of a block format, where
            x is rounded (see ``block_tile``).
    """
    numba.literally(form)
    rows, gated, size = get(fields, ROWS), get(fields, GATED), _output_bytes(form)
    parts = 2 if gated else 1
    layer, begin, end = _rows(fields, piece)
    next_layer, next_begin, _ = _rows(fields, following)
    behind = 0
    if next_layer < get(fields, LAYERS):
        behind = _address(fields, next_layer, next_begin)
    y, y_stride = _field(fields, layer, Y), size * _field(fields, layer, OUTPUTS)
    y += size * begin
    # Many rows: outputs do not fit, so they are written at once.
    width = size * (end - begin)
    is_buffered = rows * width * parts <= BUFFER
    if not is_buffered and not claim(seat):
        return
    to, to_stride = y, y_stride
    if is_buffered:
        to, to_stride = buffer_of(BUFFER_FLOATS), width
    _configure(form, min(rows, SIDE))
    if gated:
        up = to + rows * width if is_buffered else _field(fields, 1, Y) + size * begin
        _strips(fields, form, 0, begin, end, to, to_stride, _address(fields, 1, begin))
        _strips(fields, form, 1, begin, end, up, to_stride, behind)
        for i in range(rows):
            row, other = to + i * to_stride, up + i * to_stride
            if gated == SILU:
                _gate(form, SILU, row, other, end - begin)
            elif gated == GELU_TANH:
                _gate(form, GELU_TANH, row, other, end - begin)
            else:
                _gate(form, GELU, row, other, end - begin)
    else:
        _strips(fields, form, layer, begin, end, to, to_stride, behind)
    _release(form)
    if is_buffered and claim(seat):
        for i in range(rows):
            copy_bytes(to + i * width, y + i * y_stride, width)

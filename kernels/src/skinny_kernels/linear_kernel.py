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
from functools import partial
from typing import Any, NamedTuple

import numba

from skinny_kernels import amx_tile, block_amx
from skinny_kernels.activations import GELU, GELU_TANH, SILU, activated
from skinny_kernels.amx_tile import SIDE, AmxEmitter, AmxTile
from skinny_kernels.block_formats import ROWS as INTERLEAVED
from skinny_kernels.block_inputs import RECORD
from skinny_kernels.block_tile import MOST_ROWS, BlockTile
from skinny_kernels.intrinsics import Known, Word, buffer_of, copy_bytes, emits, get, known
from skinny_kernels.team_kernel import claim
from skinny_kernels.tile import DenseTile, TileArguments
from skinny_kernels.vectors import BFLOAT16, BYTES, FLOAT32, I64, Emitter, processor

# The way in which W is multiplied is a number: one of the dtypes of dense weights (see
# ``vectors``), ``AMX`` for bfloat16 by tiles of AMX, or for GGUF ``BLOCKS`` plus ggml's number of
# the block format.
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


class Division(NamedTuple):
    """Rows of W in a tile, in a strip and in a piece, and the number of pieces."""

    height: int
    strip: int
    share: int
    pieces: int


def shares(
    way: int, rows: int, w_stride: int, outputs: Sequence[int], threads: int, gated: int
) -> Division:
    """Divide layers into pieces.

    Args:
        way: how W is multiplied.
        rows: of x.
        w_stride: bytes from row to row of W.
        outputs: rows of W of each layer.
        threads: that are to share the work.
        gated: an activation, for pieces that have the same rows of both layers; or ``NOT_GATED``.
    """
    height = _height(way, rows)
    strip = height * max(1, STRIP // (height * w_stride))
    most = min(PIECE // w_stride, BUFFER // (rows * BYTES[_output(way)] * (2 if gated else 1)))
    count = max(1, min(sum(outputs) // (SHARES * threads), most) // strip)
    share = strip * count
    pieces = sum(-(-n // share) for n in (outputs[:1] if gated else outputs))
    return Division(height, strip, share, pieces)


def _height(way: int, rows: int) -> int:
    """Return the rows of W in a tile for so many rows of x, of which a strip is a multiple."""
    if way >= BLOCKS:
        return INTERLEAVED
    heights = TILES[processor().lanes]
    return 2 * SIDE if way == AMX else heights[min(rows, len(heights)) - 1]


def _most_rows(way: int) -> int:
    """Return the rows of x in the largest tile."""
    if way >= BLOCKS:
        return MOST_ROWS
    return 2 * SIDE if way == AMX else len(TILES[processor().lanes])


def _output(way: int) -> int:
    """Return the dtype of the outputs and biases."""
    return FLOAT32 if way >= BLOCKS else BFLOAT16 if way == AMX else way


@emits
def _gate(
    emitter: Emitter, way: Known, activation: Word, gate: Word, up: Word, count: Word
) -> None:
    """Replace ``count`` numbers g by activation(g) * up, rounded where PyTorch rounds."""
    dtype = _output(way)

    def apply(name: int) -> None:
        def gated(g: Any, other: Any) -> Any:
            return emitter.b.fmul(emitter.through(activated(emitter, name, g), dtype), other)

        emitter.transform(count, dtype, (gate, up), gate, gated)

    emitter.choose(activation, {name: partial(apply, name) for name in (SILU, GELU_TANH, GELU)})


@emits
def _multiply(
    emitter: Emitter, way: Known, passes: Word, s: Word, strip: TileArguments, outputs: Word
) -> None:
    """Multiply s rows of x by ``outputs`` rows of W, in one of so many passes over these.

    ``strip``: what tiles are given, for the first of these rows.
    """
    if way == AMX:
        _amx_tiles(emitter, passes, s, strip, outputs)
    elif way >= BLOCKS:
        _block_tiles(emitter, way - BLOCKS, s, strip, outputs)
    else:
        _tiles(emitter, way, passes, s, strip, outputs)


def _amx_tiles(emitter: Emitter, passes: Any, n: Any, strip: TileArguments, outputs: Any) -> None:
    """Emit: up to 32 rows of x times a strip of W (see ``_multiply``)."""
    b = emitter.b
    full = b.icmp_signed(">", n, I64(SIDE))
    several = b.icmp_signed(">", passes, I64(1))
    width = b.select(b.or_(several, full), I64(SIDE), n)
    with b.if_else(full) as (two_tiles, one_tile):
        for s, branch in ((2, two_tiles), (1, one_tile)):
            with branch:
                begin = I64(0)
                for r in (2, 1):
                    tile = AmxTile(b.module, r, s).tile()
                    rows = begin, outputs, SIDE * r
                    begin = _each(emitter, tile, rows, BYTES[BFLOAT16], strip, n, width)


def _block_tiles(
    emitter: Emitter, ggml_type: int, s: Any, strip: TileArguments, outputs: Any
) -> None:
    """Emit: S rows of x times a strip of W in a block format (see ``_multiply``)."""
    b = emitter.b
    tile = BlockTile(b.module, processor().for_blocks(), ggml_type).tile()

    def multiply(n: Any) -> None:
        given = _from_row(emitter, strip, n, BYTES[FLOAT32])
        left = b.sub(outputs, n)
        is_last = b.icmp_signed("<=", left, I64(INTERLEAVED))
        following = b.add(given.w, b.mul(given.w_stride, I64(INTERLEAVED)))
        given = given._replace(ahead=b.select(is_last, strip.ahead, following))
        b.call(tile, [*given, s, left])

    emitter.repeat(outputs, INTERLEAVED, multiply)


def _tiles(
    emitter: Emitter, dtype: int, passes: Any, s: Any, strip: TileArguments, outputs: Any
) -> None:
    """Emit: S rows of x times a strip of W, for any S (see ``_multiply``)."""
    b, heights = emitter.b, TILES[processor().lanes]
    max_rows, last = len(heights), heights[-1]

    def multiply(s: int, height: int, ahead: int) -> None:
        begin = I64(0)
        for r in dict.fromkeys((height, 1)):
            tile = DenseTile(b.module, processor(), dtype, r, s, min(r, ahead)).tile()
            begin = _each(emitter, tile, (begin, outputs, r), BYTES[dtype], strip)

    # One pass: by S; one of several passes: by -S
    cases = {n: partial(multiply, n, r, r) for n, r in enumerate(heights, start=1)}
    for n in range((max_rows + 1) // 2, max_rows + 1):
        cases[-n] = partial(multiply, n, last, -(-last // READING_PASSES))
    alone = b.icmp_signed("==", passes, I64(1))
    emitter.choose(b.select(alone, s, b.neg(s)), cases)


def _each(
    emitter: Emitter, tile: Any, rows: tuple[Any, Any, int], size: int, strip: Any, *more: Any
) -> Any:
    """Emit: call a tile for rows of W; return the first row left.

    Args:
        emitter: see ``_multiply``.
        tile: the function.
        rows: the first one, the one behind the last one, and how many the tile has.
        size: bytes of an output.
        strip: see ``_multiply``.
        *more: further arguments of ``tile``.
    """

    def multiply(n: Any) -> None:
        emitter.b.call(tile, [*_from_row(emitter, strip, n, size), *more])

    return emitter.steps(*rows, multiply)


def _from_row(emitter: Emitter, strip: TileArguments, n: Any, size: int) -> TileArguments:
    """Emit: what a tile is given whose first row of W is row n of a strip."""
    b = emitter.b
    down, along = b.mul(n, strip.w_stride), b.mul(n, I64(size))
    return strip._replace(
        w=b.add(strip.w, down),
        y=b.add(strip.y, along),
        bias=b.select(emitter.is_there(strip.bias), b.add(strip.bias, along), strip.bias),
        ahead=b.add(strip.ahead, down),
    )


@emits
def _configure(emitter: Emitter, way: Known, rows: Word) -> None:
    """Set this thread's registers of AMX for so many rows of x."""
    amx = AmxEmitter(emitter.module, SIDE, emitter.b)
    if way == AMX:
        amx.configure(amx_tile.sizes(emitter.b, rows))
    elif _has_byte_tiles(way):
        amx.configure(block_amx.SIZES)


@emits
def _release(emitter: Emitter, way: Known) -> None:
    """Give the registers of AMX back."""
    if way == AMX or _has_byte_tiles(way):
        AmxEmitter(emitter.module, SIDE, emitter.b).amx("tilerelease")


def _has_byte_tiles(way: int) -> bool:
    return way >= BLOCKS and block_amx.can_multiply(way - BLOCKS, processor())


_output_bytes = known(lambda way: BYTES[_output(way)])
_largest = known(_most_rows)
_is_amx = known(lambda way: int(way == AMX))
_is_blocks = known(lambda way: int(way >= BLOCKS))


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
    fields: Any, way: Any, layer: Any, begin: Any, end: Any, y: Any, y_stride: Any, behind: Any
) -> None:
    """Multiply x by rows of a layer's W.

    Args:
        fields: see ``multiply``.
        way: likewise.
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
        _output_bytes(way),
        _field(fields, layer, W_STRIDE),
        _field(fields, layer, BIAS),
    )
    amx, max_rows, height = _is_amx(way), _largest(way), get(fields, HEIGHT)
    passes = (rows + max_rows - 1) // max_rows
    reading_passes = 1 if amx or _is_blocks(way) else READING_PASSES
    # From row to row of x: the records of a row are not next to each other.
    x_step = RECORD if _is_blocks(way) else x_stride
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
            given = TileArguments(
                w=here,
                w_stride=w_stride,
                x=x + first * x_step,
                x_stride=x_stride,
                inputs=inputs,
                y=y + first * y_stride + size * (row - begin),
                y_stride=y_stride,
                bias=bias + size * row if bias else 0,
                ahead=ahead + part if i < reading_passes else here,
            )
            _multiply(way, passes, last - first, given, count)


@numba.njit(error_model="numpy")
def multiply(fields: Any, piece: Any, following: Any, seat: Any, way: Any) -> None:
    """Compute a piece of the layers (see ``X`` and so on, and ``shares``).

    Args:
        fields: int64.
        piece: number of the piece.
        following: of the one that this thread computes next.
        seat: to claim the piece.
        way: a dtype of dense weights; or ``AMX``, for layers of a multiple of 32 inputs and of 16
            outputs, where x is interleaved; or ``BLOCKS`` + ggml's number of a block format, where
            x is rounded (see ``block_tile``).
    """
    numba.literally(way)
    rows, gated, size = get(fields, ROWS), get(fields, GATED), _output_bytes(way)
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
    _configure(way, min(rows, SIDE))
    if gated:
        up = to + rows * width if is_buffered else _field(fields, 1, Y) + size * begin
        _strips(fields, way, 0, begin, end, to, to_stride, _address(fields, 1, begin))
        _strips(fields, way, 1, begin, end, up, to_stride, behind)
        for i in range(rows):
            _gate(way, gated, to + i * to_stride, up + i * to_stride, end - begin)
    else:
        _strips(fields, way, layer, begin, end, to, to_stride, behind)
    _release(way)
    if is_buffered and claim(seat):
        for i in range(rows):
            copy_bytes(to + i * width, y + i * y_stride, width)

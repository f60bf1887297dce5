"""The kernel of ``attention``: softmax(Q K^T + mask) V of few queries, compiled for this processor.

All queries that attend with the same head of keys (of every token, and of every head of the group)
are rows of one small matrix, and a vector holds the same number of consecutive rows: scores are
[keys, rows], and so is everything else, so that softmax needs no sum across a vector's lanes and
the keys and values are read as they lie in memory. Both products are sums of a number of a key or
value, repeated in a vector, times a vector of the other matrix.

The keys of a row of the batch are its committed ones, and those of the queries' own tokens, which
are in the last slots; the slots between are skipped. They are divided into blocks of ``KEYS``, but
the queries' own belong to one block, where the first of them begins: so a node of a draft adds up
the keys of its path in the same order and blocks as it does in a step of its own, if its position
is in that block (see ``attention.deepest``). Keys that are masked add 0. A block has its own
maximum and sum, as in flash decoding (Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html), and the thread that finishes a head's last
block combines them, in their order. So the result depends on neither the number of threads nor the
other rows.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from token_recycling.model.cpu.vectors import (
    BYTES,
    F32,
    FLOAT32,
    I64,
    Emitter,
    constant,
    get,
    processor,
    source,
    take,
)
from token_recycling.util.compiled import kept

KEYS = 128  # keys in a block
MOST_TOKENS = 128  # whose keys the last block has too
MOST_SIZE = 256  # numbers in a key or a value
# Rows of A in a tile, by vectors of B: as many sums as the registers hold, next to those vectors.
TILES = {16: (16, 12, 8), 8: (8, 6, 4), 4: (16, 12, 8)}
MOST_VECTORS = 3
# Numbers in a thread's buffers: scores of a block; its keys or values as float32.
SCORES, FLOATS = (KEYS + MOST_TOKENS) * MOST_VECTORS * 16, (KEYS + MOST_TOKENS) * MOST_SIZE

# Numbers that a thread is given, all int64; the first are addresses, those of strides are in bytes.
(
    QUERIES,  # float32 [batch, heads, size, width]
    KEY,  # [batch, heads, slots, size]
    VALUE,  # [batch, heads, slots, value size]
    MASK,  # float32 [batch, slots, width], those of a row without the slots that are skipped
    PARTS,  # float32 [batch, heads, blocks, 2 + value size, width]: sum, maximum, weighted values
    OUT,  # [batch, tokens, heads, group, value size]
    SCALE,  # float32
    BATCH,
    HEADS,
    SLOTS,
    SIZE,
    VALUE_SIZE,
    TOKENS,
    GROUP,
    WIDTH,  # group * tokens, rounded up to whole vectors
    KEY_BATCH,  # strides
    KEY_HEAD,
    KEY_SLOT,
    VALUE_BATCH,
    VALUE_HEAD,
    VALUE_SLOT,
    MASK_BATCH,
    COMMITTED,  # address of int64 [batch], keys before those of the queries' own tokens
    TAKEN,  # blocks taken by threads; behind it, how many of each head are finished
) = range(24)
FIELDS = 24


def blocks_of(slots: int, tokens: int) -> int:
    """Return the blocks of a row without slots that are skipped: the most that a row has."""
    return (slots - tokens) // KEYS + 1


class _Attention(Emitter):
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
                vectors = [self.numbers(builder.add(line, I64(j * bytes_of)), 0) for j in range(v)]
                found = []
                for i in range(r):
                    one = self.splat(self.load(self.at(rows[i], k, a_column), F32))
                    found += [self.fma(one, vectors[j], sums[i * v + j]) for j in range(v)]
                return found

            found = self.loop(I64(0), count, 1, [self.splat(0.0)] * (r * v), add)
            for i in range(r):
                for j in range(v):
                    line = builder.add(self.at(c, I64(i), c_row), I64(j * bytes_of))
                    self.store(found[i * v + j], line)
            builder.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [I64] * 9)
        return self.function(f"sums_{r}_{v}_{size}", kind, emit)

    def softmax(self, masked: bool) -> Any:
        """Return the function that exponentiates a vector of rows in place.

        ``void (scores, row, mask, row of the mask, count, scale, maximum, total)``: ``count``
        vectors, ``row`` bytes apart; scores become e^(score * scale + mask - maximum). Without a
        mask, neither it nor ``scale`` is used.
        """

        def emit(
            scores: Any,
            row: Any,
            mask: Any,
            mask_row: Any,
            count: Any,
            scale: Any,
            top: Any,
            total: Any,
        ) -> None:
            b = self.b
            factor = self.splat(scale)

            def add_mask(k: Any, found: list[Any]) -> list[Any]:
                line = self.at(scores, k, row)
                value = self.numbers(line, FLOAT32)
                if masked:
                    value = self.fma(
                        value, factor, self.numbers(self.at(mask, k, mask_row), FLOAT32)
                    )
                    self.store(value, line)
                return [b.select(b.fcmp_ordered(">", value, found[0]), value, found[0])]

            def raise_e(k: Any, found: list[Any]) -> list[Any]:
                line = self.at(scores, k, row)
                power = self.exponential(b.fsub(self.numbers(line, FLOAT32), most))
                self.store(power, line)
                return [b.fadd(found[0], power)]

            (most,) = self.loop(I64(0), count, 1, [self.splat(float("-inf"))], add_mask)
            (found,) = self.loop(I64(0), count, 1, [self.splat(0.0)], raise_e)
            self.store(most, top)
            self.store(found, total)
            b.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [I64] * 5 + [F32] + [I64] * 2)
        return self.function(f"softmax_{int(masked)}", kind, emit)

    def weighted(self) -> Any:
        """Return ``void (weights, parts, row, part, count, out)``: out = sum of weight * part.

        For a vector of rows; weights are ``row`` bytes apart, parts ``part`` bytes.
        """

        def emit(weights: Any, parts: Any, row: Any, part: Any, count: Any, out: Any) -> None:
            def add(k: Any, sums: list[Any]) -> list[Any]:
                weight = self.numbers(self.at(weights, k, row), FLOAT32)
                return [self.fma(weight, self.numbers(self.at(parts, k, part), FLOAT32), sums[0])]

            self.store(self.loop(I64(0), count, 1, [self.splat(0.0)], add)[0], out)
            self.b.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [I64] * 6)
        return self.function("weighted", kind, emit)


@intrinsic
def _lanes(typing: Any) -> Any:
    """Return the float32 numbers in a vector."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return I64(processor().lanes)

    return types.int64(), generate


@intrinsic(prefer_literal=True)
def _buffer(typing: Any, count: Any) -> Any:
    """Return the address of ``count`` float32 numbers of this call's own."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            buffer = builder.alloca(ir.ArrayType(F32, count.literal_value))
        buffer.align = 64
        return builder.ptrtoint(buffer, I64)

    return types.int64(constant(count)), generate


@intrinsic(prefer_literal=True)
def _product(
    typing: Any,
    form: Any,
    v: Any,
    rows: Any,
    a: Any,
    a_row: Any,
    a_column: Any,
    count: Any,
    b: Any,
    b_row: Any,
    c: Any,
    c_row: Any,
    ahead: Any,
    ahead_row: Any,
) -> Any:
    """Compute ``C = A B`` for ``rows`` rows of A and v vectors of B (see ``_Attention.sums``).

    For each row of A, ``ahead_row`` bytes of a dtype are read ahead.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter = _Attention(builder.module, processor().lanes)
        emitter.b = builder
        _, v, rows, a, a_row, *others, c, c_row, ahead, ahead_row = arguments
        done = builder.append_basic_block("product_done")
        choice = builder.switch(v, done)
        for width, height in enumerate(TILES[processor().lanes], start=1):
            block = builder.append_basic_block(f"vectors_{width}")
            choice.add_case(I64(width), block)
            builder.position_at_end(block)
            begin = I64(0)
            for r in (height, 1):
                tile = emitter.sums(r, width, BYTES[form.literal_value])

                def body(n: Any, values: list[Any], r: int = r, tile: Any = tile) -> list[Any]:
                    at_a, at_c = emitter.at(a, n, a_row), emitter.at(c, n, c_row)
                    fetched = emitter.at(ahead, n, ahead_row)
                    builder.call(tile, [at_a, a_row, *others, at_c, c_row, fetched])
                    return [builder.add(n, I64(r))]

                end = builder.sub(rows, I64(r - 1))
                (begin,) = emitter.loop(begin, end, r, [begin], body)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(constant(form), *[types.int64] * 12), generate


@intrinsic(prefer_literal=True)
def _softmax(
    typing: Any,
    masked: Any,
    scores: Any,
    row: Any,
    mask: Any,
    mask_row: Any,
    count: Any,
    scale: Any,
    top: Any,
    total: Any,
) -> Any:
    """See ``_Attention.softmax``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter = _Attention(builder.module, processor().lanes)
        builder.call(emitter.softmax(bool(masked.literal_value)), arguments[1:])
        return context.get_dummy_value()

    whole = [types.int64] * 5
    numbers = types.float32, types.int64, types.int64
    return types.void(constant(masked), *whole, *numbers), generate


@intrinsic
def _weighted(
    typing: Any, weights: Any, parts: Any, row: Any, part: Any, count: Any, out: Any
) -> Any:
    """See ``_Attention.weighted``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(_Attention(builder.module, processor().lanes).weighted(), arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@intrinsic
def _read(typing: Any, address: Any) -> Any:
    """Return the float32 number at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter = Emitter(builder.module, processor().lanes)
        emitter.b = builder
        return emitter.load(arguments[0], F32)

    return types.float32(types.int64), generate


@intrinsic
def _int(typing: Any, address: Any) -> Any:
    """Return the int64 number at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], I64.as_pointer()))

    return types.int64(types.int64), generate


@intrinsic(prefer_literal=True)
def _write(typing: Any, form: Any, address: Any, value: Any) -> Any:
    """Write a float32 number to an address, in a dtype."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, emitter = form.literal_value, Emitter(builder.module, processor().lanes)
        emitter.b = builder
        emitter.store(emitter.rounded(arguments[2], kind), arguments[1], align=BYTES[kind])
        return context.get_dummy_value()

    return types.void(constant(form), types.int64, types.float32), generate


@intrinsic(prefer_literal=True)
def _widen(typing: Any, form: Any, source: Any, target: Any, count: Any) -> Any:
    """Write ``count`` numbers of a dtype as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, target, count = arguments
        kind, lanes = form.literal_value, processor().lanes
        emitter = Emitter(builder.module, lanes)
        emitter.b = builder
        size = I64(BYTES[kind])

        def vector(k: Any, values: list[Any]) -> list[Any]:
            value = emitter.numbers(emitter.at(source, k, size), kind)
            emitter.store(value, emitter.at(target, k, I64(4)))
            return []

        def one(k: Any, values: list[Any]) -> list[Any]:
            value = emitter.number(emitter.at(source, k, size), kind)
            emitter.store(value, emitter.at(target, k, I64(4)))
            return []

        whole = builder.and_(count, I64(-lanes))
        emitter.loop(I64(0), whole, lanes, [], vector)
        emitter.loop(whole, count, 1, [], one)
        return context.get_dummy_value()

    return types.void(constant(form), types.int64, types.int64, types.int64), generate


@numba.njit(error_model="numpy")
def _float_rows(
    form: Any,
    source: Any,
    stride: Any,
    first: Any,
    skipped: Any,
    count: Any,
    size: Any,
    buffer: Any,
) -> tuple[Any, Any]:
    """Return address and stride of ``count`` rows of ``size`` numbers as float32.

    After the first ``first`` of them, ``skipped`` rows are left out.
    """
    if form == FLOAT32 and (count <= first or not skipped):
        return source, stride
    for n in range(count):
        row = n if n < first else n + skipped
        _widen(form, source + row * stride, buffer + 4 * n * size, size)
    return buffer, 4 * size


@numba.njit(error_model="numpy")
def _combine(fields: Any, head: Any, blocks: Any, form: Any) -> None:
    """Add up the first ``blocks`` blocks of a head, and write what its queries attend to."""
    numba.literally(form)
    heads, tokens, group, width = (
        get(fields, HEADS),
        get(fields, TOKENS),
        get(fields, GROUP),
        get(fields, WIDTH),
    )
    value_size = get(fields, VALUE_SIZE)
    row, lane_bytes = 4 * width, 4 * _lanes()
    part = (value_size + 2) * row
    parts = get(fields, PARTS) + head * _blocks(fields) * part
    unused = _buffer(16)
    for column in range(0, row, lane_bytes):
        sums, weights = parts + column, parts + row + column
        _softmax(0, weights, part, 0, 0, blocks, np.float32(0), unused, unused)
        for n in range(value_size + 1):
            values = sums if n == value_size else weights + (n + 1) * row
            _weighted(weights, values, part, part, blocks, values)
    b, h = head // heads, head % heads
    for t in range(tokens):
        line = get(fields, OUT) + BYTES[form] * ((b * tokens + t) * heads + h) * group * value_size
        for g in range(group):
            of_row = parts + 4 * (g * tokens + t)
            for d in range(value_size):
                value = _read(of_row + (d + 2) * row) / _read(of_row)
                _write(form, line + BYTES[form] * (g * value_size + d), value)


@numba.njit(error_model="numpy")
def _blocks(fields: Any) -> Any:
    """Return the number of blocks (see ``blocks_of``)."""
    return (get(fields, SLOTS) - get(fields, TOKENS)) // KEYS + 1


@numba.njit(error_model="numpy")
def _block(fields: Any, item: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return row of the batch, head of keys and first slot of a block, and its keys and values.

    The last two are addresses.
    """
    heads, blocks = get(fields, HEADS), _blocks(fields)
    head, begin = item // blocks, item % blocks * KEYS
    b, h = head // heads, head % heads
    keys = get(fields, KEY) + b * get(fields, KEY_BATCH) + h * get(fields, KEY_HEAD)
    values = get(fields, VALUE) + b * get(fields, VALUE_BATCH) + h * get(fields, VALUE_HEAD)
    keys += begin * get(fields, KEY_SLOT)
    return b, head, begin, keys, values + begin * get(fields, VALUE_SLOT)


@numba.njit(error_model="numpy")
def _work(fields: Any, form: Any) -> None:
    """Take blocks of keys until none is left."""
    numba.literally(form)
    tokens, width = get(fields, TOKENS), get(fields, WIDTH)
    size, value_size = get(fields, SIZE), get(fields, VALUE_SIZE)
    scale = _read(get(fields, SCALE))
    blocks = _blocks(fields)
    items = get(fields, BATCH) * get(fields, HEADS) * blocks
    row, lane_bytes = 4 * width, 4 * _lanes()
    part = (value_size + 2) * row
    scores, score_row = _buffer(SCORES), MOST_VECTORS * lane_bytes
    key_floats, value_floats = _buffer(FLOATS), _buffer(FLOATS)
    item = take(fields, TAKEN)
    while item < items:
        b, head, begin, keys, values = _block(fields, item)
        following = take(fields, TAKEN)
        committed = _int(get(fields, COMMITTED) + 8 * b)
        if begin > committed:
            item = following
            continue
        is_last = begin // KEYS == committed // KEYS
        skipped = get(fields, SLOTS) - tokens - committed
        next_keys, next_values = keys, values  # are in the cache
        if following < items:
            _, _, _, next_keys, next_values = _block(fields, following)
        count = committed - begin + tokens if is_last else KEYS
        queries = get(fields, QUERIES) + head * size * row
        mask = get(fields, MASK) + b * get(fields, MASK_BATCH) + begin * row
        own = get(fields, PARTS) + (head * blocks + item % blocks) * part
        key_row, value_row = get(fields, KEY_SLOT), get(fields, VALUE_SLOT)
        key_bytes, value_bytes = key_row, count * value_row // value_size
        own_at = committed - begin if is_last else KEYS
        keys, key_row = _float_rows(form, keys, key_row, own_at, skipped, count, size, key_floats)
        values, value_row = _float_rows(
            form, values, value_row, own_at, skipped, count, value_size, value_floats
        )
        for column in range(0, row, score_row):
            v = min(MOST_VECTORS, (row - column) // lane_bytes)
            _product(
                form,
                v,
                count,
                keys,
                key_row,
                4,
                size,
                queries + column,
                row,
                scores,
                score_row,
                next_keys,
                key_bytes,
            )
            for j in range(v):
                at, to = column + j * lane_bytes, scores + j * lane_bytes
                _softmax(1, to, score_row, mask + at, row, count, scale, own + row + at, own + at)
            to = own + 2 * row + column
            _product(
                form,
                v,
                value_size,
                values,
                4,
                value_row,
                count,
                scores,
                score_row,
                to,
                row,
                next_values,
                value_bytes,
            )
            next_keys, next_values = keys, values
        if take(fields, FIELDS + head) == committed // KEYS:
            _combine(fields, head, committed // KEYS + 1, form)
        item = following


def compile_kernel(form: int) -> Any:
    """Return ``void (int64 *fields)`` for a dtype of keys and values (see ``QUERIES`` and so on).

    Machine code is kept (see ``kept``).
    """
    version = source()

    def run(fields: Any) -> None:
        if version:
            _work(fields, form)

    return kept(numba.cfunc, types.void(types.voidptr))(run)

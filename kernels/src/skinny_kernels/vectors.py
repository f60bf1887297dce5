"""What the kernels are built from: LLVM vector instructions."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log
from typing import Any

import llvmlite.binding as llvm
import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Dtypes, as numbers that numba compiles a function for.
FLOAT32, BFLOAT16, FLOAT16 = range(3)
BYTES = (4, 2, 2)
FORMS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

LINE = 64  # bytes of a line of the caches
LOG2_E, LN_2 = 1 / log(2), log(2)
# Added to a float32 number of moderate size, it leaves the nearest whole number in the last bits.
ROUND = 12582912.0  # 1.5 * 2^23

I8, I16, I32, I64, F16, F32 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.HalfType(),
    ir.FloatType(),
)


@dataclass(frozen=True)
class Processor:
    """What the kernels need to know about the processor that they are compiled for.

    Attributes:
        lanes: float32 numbers in a vector register; 0 without a fused multiply-add of vectors.
        dot_bfloat16: it multiplies pairs of bfloat16 numbers (AVX512_BF16).
        tiles: it multiplies tiles of bfloat16 numbers (AMX), and this process may.
        dot_unsigned: its instruction that multiplies bytes without sign by bytes with one, and adds
            up four products (VNNI); empty if there is none.
        dot_bytes: it adds up products of bytes with any instruction.
        byte_tiles: it multiplies tiles of bytes (AMX), has VNNI, and this process may.
    """

    lanes: int
    dot_bfloat16: bool
    tiles: bool = False
    dot_unsigned: str = ""
    dot_bytes: bool = False
    byte_tiles: bool = False

    @classmethod
    def of(cls, features: str) -> Processor:
        """Read LLVM's list of features, such as ``+avx2,-avx512f``."""
        has = {name[1:] for name in features.split(",") if name.startswith("+")}
        kinds = ((16, {"avx512f"}), (8, {"avx2", "fma"}), (4, {"neon"}))
        lanes = next((lanes for lanes, needed in kinds if needed <= has), 0)
        tiles = lanes == 16 and {"amx-tile", "amx-bf16"} <= has and _may_use_tiles()
        vnni = {16: ("avx512vnni", "vpdpbusd"), 8: ("avxvnni", "{vex} vpdpbusd")}.get(lanes)
        unsigned = vnni[1] if vnni and vnni[0] in has else ""
        dots = {16: {"avx512bw"}, 8: {"avx2", "f16c"}, 4: {"dotprod"}}  # of bytes
        dot_bytes = lanes > 0 and dots[lanes] <= has
        byte_tiles = unsigned != "" and lanes == 16 and {"amx-tile", "amx-int8"} <= has
        byte_tiles = byte_tiles and _may_use_tiles()
        bfloat16 = lanes == 16 and "avx512bf16" in has
        return cls(lanes, bfloat16, tiles, unsigned, dot_bytes, byte_tiles)

    def for_blocks(self) -> Processor:
        """Return what the tiles for block formats need to know: without VNNI, AVX-512 is AVX2."""
        return replace(self, lanes=8) if self.lanes == 16 and not self.dot_unsigned else self

    def dots(self, form: int) -> bool:
        """Return whether inputs are read as bfloat16 too; otherwise they are float32."""
        return form == BFLOAT16 and self.dot_bfloat16


@lru_cache
def _may_use_tiles() -> bool:
    """Ask Linux for the registers of AMX, which a process has to do once; return its answer."""
    try:
        arch_prctl: Any = ctypes.CDLL(None).syscall
    except (OSError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return False
    number, request, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM of x86-64
    return sys.platform == "linux" and not arch_prctl(number, request, tile_data)


@lru_cache
def processor() -> Processor:
    """Return the processor that numba compiles for."""
    from numba.core.registry import cpu_target

    llvm.initialize_native_asmparser()  # instructions that have no intrinsic are assembled
    return Processor.of(cpu_target.target_context.codegen()._get_host_cpu_features())


class Emitter:
    """Emits the instructions of one function.

    Attributes:
        module: of LLVM, to which functions are added.
        lanes: float32 numbers in a vector.
        vector: type of such a vector.
        b: builder of the function being emitted.
    """

    def __init__(self, module: Any, lanes: int) -> None:
        self.module, self.lanes = module, lanes
        self.vector = ir.VectorType(F32, lanes)
        self.b: Any = None

    def function(self, name: str, kind: Any, emit: Callable[..., None]) -> Any:
        """Return the module's function of this name; ``emit(*arguments)`` emits it if need be."""
        if name in self.module.globals:
            return self.module.globals[name]
        function = ir.Function(self.module, kind, name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        outer, self.b = self.b, ir.IRBuilder(function.append_basic_block("entry"))
        emit(*function.args)
        self.b = outer
        return function

    def loop(self, begin: Any, end: Any, step: int, values: list[Any], body: Any) -> list[Any]:
        """Run ``body(k, values)`` for k in range(begin, end, step); return the last values."""
        b = self.b
        entry = b.block
        loop, done = b.append_basic_block("loop"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed("<", begin, end), loop, done)
        b.position_at_end(loop)
        k = b.phi(I64)
        current = [b.phi(value.type) for value in values]
        updated = body(k, current)
        following = b.add(k, I64(step))
        k.add_incoming(begin, entry)
        k.add_incoming(following, b.block)
        for phi, first, value in zip(current, values, updated):
            phi.add_incoming(first, entry)
            phi.add_incoming(value, b.block)
        last = b.block
        b.cbranch(b.icmp_signed("<", following, end), loop, done)
        b.position_at_end(done)
        return [self.either((first, entry), (value, last)) for first, value in zip(values, updated)]

    def either(self, *values: tuple[Any, Any]) -> Any:
        """Return the value of the block that control came from."""
        phi = self.b.phi(values[0][0].type)
        for value, block in values:
            phi.add_incoming(value, block)
        return phi

    def load(self, address: Any, kind: Any, align: int | None = None) -> Any:
        """Load a number or a vector from an address, by default aligned as its numbers are."""
        if align is None:
            align = {I16: 2, F16: 2}.get(getattr(kind, "element", kind), 4)
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Any, address: Any, align: int = 4) -> None:
        """Store a number or a vector."""
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def prefetch(self, address: Any) -> None:
        """Start to read a line of memory into the L2 cache."""
        byte = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(self.module, kind, "llvm.prefetch.p0")
        # of data, for reading; 2 is L2: into L1, lines would displace those in use
        self.b.call(prefetch, [self.b.inttoptr(address, byte), I32(0), I32(2), I32(1)])

    def at(self, base: Any, index: Any, stride: Any) -> Any:
        """Return the address ``base + index * stride``."""
        return self.b.add(base, self.b.mul(index, stride))

    def numbers(self, address: Any, form: int, mask: Any = None) -> Any:
        """Load as many numbers of this dtype as a vector has lanes, as float32.

        Lanes outside ``mask`` (see ``vectors``) are 0, and their memory is not read.
        """
        b, lanes = self.b, self.lanes
        element = (F32, I16, F16)[form]
        kind = ir.VectorType(element, lanes)
        if mask is None:
            loaded = self.load(address, kind)
        else:
            pointer = b.inttoptr(address, kind.as_pointer())
            load = self._masked("load", kind, kind, [kind.as_pointer(), I32, mask.type, kind])
            loaded = b.call(load, [pointer, I32(BYTES[form]), mask, ir.Constant(kind, None)])
        if form == FLOAT32:
            return loaded
        if form == FLOAT16:
            return b.fpext(loaded, self.vector)
        wide = ir.VectorType(I32, lanes)
        bits = b.zext(loaded, wide)
        return b.bitcast(b.shl(bits, ir.Constant(wide, [16] * lanes)), self.vector)

    def write(self, value: Any, address: Any, form: int, mask: Any = None) -> None:
        """Store float32 numbers in this dtype; only the lanes of ``mask``, if given."""
        rounded = self.rounded(value, form)
        if mask is None:
            self.store(rounded, address, align=BYTES[form])
            return
        kind = rounded.type
        store = self._masked(
            "store", kind, ir.VoidType(), [kind, kind.as_pointer(), I32, mask.type]
        )
        pointer = self.b.inttoptr(address, kind.as_pointer())
        self.b.call(store, [rounded, pointer, I32(BYTES[form]), mask])

    def _masked(self, verb: str, kind: Any, result: Any, arguments: list[Any]) -> Any:
        element = {F32: "f32", I16: "i16", F16: "f16"}[kind.element]
        name = f"llvm.masked.{verb}.v{self.lanes}{element}.p0"
        return cgutils.get_or_insert_function(self.module, ir.FunctionType(result, arguments), name)

    def rounded(self, value: Any, form: int) -> Any:
        """Return float32 numbers, or one, in another dtype; ties to even."""
        b = self.b
        lanes = getattr(value.type, "count", 0)

        def constant(number: int) -> Any:
            return (
                ir.Constant(ir.VectorType(I32, lanes), [number] * lanes) if lanes else I32(number)
            )

        def of(element: Any) -> Any:
            return ir.VectorType(element, lanes) if lanes else element

        if form == FLOAT32:
            return value
        if form == FLOAT16:
            return b.fptrunc(value, of(F16))
        bits = b.bitcast(value, of(I32))
        odd = b.and_(b.lshr(bits, constant(16)), constant(1))
        nearest = b.lshr(b.add(bits, b.add(odd, constant(0x7FFF))), constant(16))
        nan = b.fcmp_unordered("uno", value, value)
        return b.trunc(b.select(nan, constant(0x7FC0), nearest), of(I16))

    def through(self, value: Any, form: int) -> Any:
        """Return float32 vectors rounded to another dtype and back."""
        b = self.b
        if form == FLOAT32:
            return value
        rounded = self.rounded(value, form)
        if form == FLOAT16:
            return b.fpext(rounded, self.vector)
        wide = ir.VectorType(I32, self.lanes)
        bits = b.shl(b.zext(rounded, wide), ir.Constant(wide, [16] * self.lanes))
        return b.bitcast(bits, self.vector)

    def vectors(self, count: Any, values: list[Any], body: Any) -> list[Any]:
        """Run ``body(k, mask, values)`` for vectors that begin at 0, lanes, …, below ``count``.

        ``mask`` has the lanes below ``count`` in the last vector if that is not full, and is None
        in all others.
        """
        b, lanes = self.b, self.lanes
        vectors_end = b.and_(count, I64(-lanes))
        updated = self.loop(
            I64(0), vectors_end, lanes, values, lambda k, inner: body(k, None, inner)
        )
        before = b.block
        rest, done = b.append_basic_block("part"), b.append_basic_block("all")
        b.cbranch(b.icmp_signed("<", vectors_end, count), rest, done)
        b.position_at_end(rest)
        numbers = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
        remaining = self.splat_bits(b.trunc(b.sub(count, vectors_end), I32))
        last = body(vectors_end, b.icmp_signed("<", numbers, remaining), updated)
        end = b.block
        b.branch(done)
        b.position_at_end(done)
        return [self.either((full, before), (more, end)) for full, more in zip(updated, last)]

    def lane_sum(self, vector: Any) -> Any:
        """Return the sum of a vector's lanes."""
        return self.across(vector, self.b.fadd)

    def across(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine a vector's lanes."""
        width = self.lanes
        while width > 1:
            width //= 2
            picks = [(i + width) % self.lanes for i in range(self.lanes)]
            vector = combine(vector, self.shuffled(vector, vector, picks))
        return self.b.extract_element(vector, I32(0))

    def shuffled(self, first: Any, second: Any, picks: Sequence[int]) -> Any:
        """Return elements of two vectors; those of the second count behind the first's."""
        mask = ir.Constant(ir.VectorType(I32, len(picks)), list(picks))
        return self.b.shuffle_vector(first, second, mask)

    def joined(self, vectors: Sequence[Any]) -> Any:
        """Return the elements of vectors of the same length, a power of two of them, in a row."""
        parts = list(vectors)
        while len(parts) > 1:
            count = parts[0].type.count
            pairs = zip(parts[::2], parts[1::2])
            parts = [self.shuffled(a, c, range(2 * count)) for a, c in pairs]
        return parts[0]

    def transposed(self, rows: list[Any]) -> list[Any]:
        """Return the columns of a square of vectors: blocks of half the size are exchanged."""
        block = lanes = self.lanes
        columns = list(rows)
        while block > 1:
            block //= 2
            low = [n if not n & block else lanes + n - block for n in range(lanes)]
            high = [n + block if not n & block else lanes + n for n in range(lanes)]
            for i in (i for i in range(lanes) if not i & block):
                pair = columns[i], columns[i + block]
                columns[i] = self.shuffled(*pair, low)
                columns[i + block] = self.shuffled(*pair, high)
        return columns

    def number(self, address: Any, form: int) -> Any:
        """Load one number of this dtype, as float32."""
        b = self.b
        if form == FLOAT32:
            return self.load(address, F32)
        if form == FLOAT16:
            return b.fpext(self.load(address, F16), F32)
        return b.bitcast(b.shl(b.zext(self.load(address, I16), I32), I32(16)), F32)

    def fma(self, a: Any, c: Any, total: Any) -> Any:
        """Return ``a * c + total``, of numbers or vectors."""
        kind = total.type
        name = "llvm.fma.f32" if kind == F32 else f"llvm.fma.v{self.lanes}f32"
        fma = cgutils.get_or_insert_function(self.module, ir.FunctionType(kind, [kind] * 3), name)
        return self.b.call(fma, [a, c, total])

    def splat(self, value: Any) -> Any:
        """Return a vector that repeats a float32 number."""
        if isinstance(value, float):
            return ir.Constant(self.vector, [value] * self.lanes)
        return self.splat_bits(value)

    def splat_bits(self, value: Any) -> Any:
        """Return a vector that repeats a number of 32 bits."""
        undefined = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        first = self.b.insert_element(undefined, value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes)
        return self.b.shuffle_vector(first, undefined, zeros)

    def exponential(self, x: Any) -> Any:
        """Return e^x of a vector of numbers that are 0 or less; NaN stays.

        2^n is written into the bits of the exponent, for n the whole number nearest x log2(e); the
        Taylor series of 2^f for the rest, at most 1/2, is off by 5e-9 after eight terms.
        """
        b = self.b
        least = self.splat(-127.0)  # e^x is then written as 0
        scaled = b.fmul(x, self.splat(LOG2_E))
        scaled = b.select(b.fcmp_ordered("<", scaled, least), least, scaled)
        shifted = b.fadd(scaled, self.splat(ROUND))
        rest = b.fsub(scaled, b.fsub(shifted, self.splat(ROUND)))
        term, factors = 1.0, [1.0]
        for n in range(1, 8):
            term *= LN_2 / n
            factors.append(term)
        power = self.splat(factors[-1])
        for factor in reversed(factors[:-1]):
            power = self.fma(power, rest, self.splat(factor))
        integer_vector = ir.VectorType(I32, self.lanes)
        bits = b.shl(
            b.bitcast(shifted, integer_vector), ir.Constant(integer_vector, [23] * self.lanes)
        )
        bits = b.add(bits, ir.Constant(integer_vector, [127 << 23] * self.lanes))
        return b.fmul(power, b.bitcast(bits, self.vector))


def constant(kind: Any) -> Any:
    """Return the numba type of an intrinsic's argument, which must be known at compile time."""
    if not isinstance(kind, types.Literal):
        raise numba.errors.RequireLiteralValue("this argument must be a constant")
    return kind


def known(compute: Callable[[int], int]) -> Any:
    """Return an intrinsic ``int64 (form)`` of a number that is known when a kernel is compiled."""

    @intrinsic(prefer_literal=True)
    def known(typing: Any, form: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return I64(compute(form.literal_value))

        return types.int64(constant(form)), generate

    return known


def _place(builder: Any, pointer: Any, index: Any) -> Any:
    """Emit: the address of an int64 of an array."""
    address = builder.add(builder.ptrtoint(pointer, I64), builder.mul(index, I64(8)))
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def get(typing: Any, pointer: Any, index: Any) -> Any:
    """Return an int64 of an array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_place(builder, *arguments))

    return types.int64(types.voidptr, types.int64), generate


@intrinsic
def word_at(typing: Any, address: Any) -> Any:
    """Return the int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], I64.as_pointer()))

    return types.int64(types.int64), generate


@intrinsic
def copy_bytes(typing: Any, source: Any, target: Any, count: Any) -> Any:
    """Copy ``count`` bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = (builder.inttoptr(one, I8.as_pointer()) for one in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic(prefer_literal=True)
def convert(typing: Any, form: Any, to_form: Any, source: Any, target: Any, count: Any) -> Any:
    """Write ``count`` numbers of one dtype in another, or in the same."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, source, target, count = arguments
        kind, to = form.literal_value, to_form.literal_value
        emitter = Emitter(builder.module, processor().lanes)
        emitter.b = builder

        def body(k: Any, mask: Any, values: list[Any]) -> list[Any]:
            x = emitter.numbers(emitter.at(source, k, I64(BYTES[kind])), kind, mask)
            emitter.write(x, emitter.at(target, k, I64(BYTES[to])), to, mask)
            return []

        emitter.vectors(count, [], body)
        return context.get_dummy_value()

    return types.void(constant(form), constant(to_form), *[types.int64] * 3), generate

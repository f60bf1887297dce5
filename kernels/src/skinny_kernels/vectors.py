"""What the kernels are built from: LLVM's instructions for vectors.

A kernel knows dtypes by numbers, ``FLOAT32`` and so on. ``intrinsics`` makes what is emitted here
callable from the functions that numba compiles.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import log
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from numba.core import cgutils

# Dtypes, as numbers that numba compiles a function for.
FLOAT32, BFLOAT16, FLOAT16 = range(3)
BYTES = (4, 2, 2)
DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

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
VOID = ir.VoidType()
ELEMENTS = (F32, I16, F16)  # by dtype; bfloat16 numbers are loaded as their bits


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

    def dots(self, dtype: int) -> bool:
        """Return whether inputs are read as bfloat16 too; otherwise they are float32."""
        return dtype == BFLOAT16 and self.dot_bfloat16


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
        integers: type of a vector of as many whole numbers of 32 bits.
        b: builder of the function being emitted.
    """

    def __init__(self, module: Any, lanes: int, builder: Any = None) -> None:
        self.module, self.lanes, self.b = module, lanes, builder
        self.vector, self.integers = (ir.VectorType(kind, lanes) for kind in (F32, I32))

    def function(
        self, name: str, arguments: Sequence[Any], emit: Callable[..., Any], result: Any = VOID
    ) -> Any:
        """Return the module's function of this name.

        If need be, ``emit(*values)`` emits it, and returns its result.
        """
        if name in self.module.globals:
            return self.module.globals[name]
        function = ir.Function(self.module, ir.FunctionType(result, arguments), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        outer, self.b = self.b, ir.IRBuilder(function.append_basic_block("entry"))
        value = emit(*function.args)
        if value is None:
            self.b.ret_void()
        else:
            self.b.ret(value)
        self.b = outer
        return function

    def call(self, name: str, result: Any, *values: Any) -> Any:
        """Call a function of LLVM's."""
        kind = ir.FunctionType(result, [value.type for value in values])
        return self.b.call(cgutils.get_or_insert_function(self.module, kind, name), values)

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
        return [
            self._either((first, entry), (value, last)) for first, value in zip(values, updated)
        ]

    def repeat(self, end: Any, step: int, body: Callable[[Any], None]) -> None:
        """Run ``body(k)`` for k in range(0, end, step)."""

        def run(k: Any, values: list[Any]) -> list[Any]:
            body(k)
            return values

        self.loop(I64(0), end, step, [], run)

    def steps(self, begin: Any, end: Any, step: int, body: Callable[[Any], None]) -> Any:
        """Run ``body(k)`` for each whole step from ``begin`` to ``end``; return where it ends."""

        def run(k: Any, values: list[Any]) -> list[Any]:
            body(k)
            return [self.b.add(k, I64(step))]

        return self.loop(begin, self.b.sub(end, I64(step - 1)), step, [begin], run)[0]

    def when(
        self, condition: Any, values: Sequence[Any], body: Callable[[], Sequence[Any]]
    ) -> list[Any]:
        """Run ``body()`` under a condition; return the values that it returns, else ``values``."""
        b = self.b
        entry = b.block
        inside, done = b.append_basic_block("when"), b.append_basic_block("done")
        b.cbranch(condition, inside, done)
        b.position_at_end(inside)
        updated = body()
        last = b.block
        b.branch(done)
        b.position_at_end(done)
        return [
            self._either((first, entry), (value, last)) for first, value in zip(values, updated)
        ]

    def is_there(self, address: Any) -> Any:
        """Return whether an address is not 0, which stands for nothing."""
        return self.b.icmp_signed("!=", address, I64(0))

    def bias(self, address: Any, offset: int, dtype: int, mask: Any = None) -> Any:
        """Return what is added to sums: the numbers ``offset`` bytes on, or -0 without a bias."""

        def read() -> list[Any]:
            return [self.numbers(self.b.add(address, I64(offset)), dtype, mask)]

        return self.when(self.is_there(address), [self.splat(-0.0)], read)[0]

    def choose(self, number: Any, cases: Mapping[int, Callable[[], None]]) -> None:
        """Run what ``cases`` has for a number; nothing if it has none."""
        b = self.b
        done = b.append_basic_block("done")
        choice = b.switch(number, done)
        for key, run in cases.items():
            block = b.append_basic_block(f"case_{key}")
            choice.add_case(I64(key), block)
            b.position_at_end(block)
            run()
            b.branch(done)
        b.position_at_end(done)

    def _either(self, *values: tuple[Any, Any]) -> Any:
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
        # of data, for reading; 2 is L2: into L1, lines would displace those in use
        pointer = self.b.inttoptr(address, I8.as_pointer())
        self.call("llvm.prefetch.p0", VOID, pointer, I32(0), I32(2), I32(1))

    def at(self, base: Any, index: Any, stride: Any) -> Any:
        """Return the address ``base + index * stride``."""
        return self.b.add(base, self.b.mul(index, stride))

    def numbers(self, address: Any, dtype: int, mask: Any = None) -> Any:
        """Load as many numbers of this dtype as a vector has lanes, as float32.

        Lanes outside ``mask`` (see ``vectors``) are 0, and their memory is not read.
        """
        kind = ir.VectorType(ELEMENTS[dtype], self.lanes)
        if mask is None:
            return self.widened(self.load(address, kind), dtype)
        pointer = self.b.inttoptr(address, kind.as_pointer())
        zeros = ir.Constant(kind, None)
        name = self._masked("load", dtype)
        loaded = self.call(name, kind, pointer, I32(BYTES[dtype]), mask, zeros)
        return self.widened(loaded, dtype)

    def number(self, address: Any, dtype: int) -> Any:
        """Load one number of this dtype, as float32."""
        return self.widened(self.load(address, ELEMENTS[dtype]), dtype)

    def write(self, value: Any, address: Any, dtype: int, mask: Any = None) -> None:
        """Store float32 numbers in this dtype; only the lanes of ``mask``, if given."""
        rounded = self.rounded(value, dtype)
        if mask is None:
            self.store(rounded, address, align=BYTES[dtype])
            return
        pointer = self.b.inttoptr(address, rounded.type.as_pointer())
        name = self._masked("store", dtype)
        self.call(name, VOID, rounded, pointer, I32(BYTES[dtype]), mask)

    def _masked(self, verb: str, dtype: int) -> str:
        return f"llvm.masked.{verb}.v{self.lanes}{('f32', 'i16', 'f16')[dtype]}.p0"

    def widened(self, value: Any, dtype: int) -> Any:
        """Return numbers of a dtype, or one (see ``ELEMENTS``), as float32."""
        if dtype == FLOAT32:
            return value
        if dtype == FLOAT16:
            return self.b.fpext(value, _like(value, F32))
        bits = self.b.zext(value, _like(value, I32))
        return self.b.bitcast(self.b.shl(bits, _repeated(bits.type, 16)), _like(value, F32))

    def rounded(self, value: Any, dtype: int) -> Any:
        """Return float32 numbers, or one, in another dtype; ties to even."""
        b = self.b
        if dtype == FLOAT32:
            return value
        if dtype == FLOAT16:
            return b.fptrunc(value, _like(value, F16))
        bits = b.bitcast(value, _like(value, I32))
        constant = partial(_repeated, bits.type)
        odd = b.and_(b.lshr(bits, constant(16)), constant(1))
        nearest = b.lshr(b.add(bits, b.add(odd, constant(0x7FFF))), constant(16))
        nan = b.fcmp_unordered("uno", value, value)
        return b.trunc(b.select(nan, constant(0x7FC0), nearest), _like(value, I16))

    def through(self, value: Any, dtype: int) -> Any:
        """Return float32 vectors rounded to another dtype and back."""
        return self.widened(self.rounded(value, dtype), dtype)

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

        def rest() -> Any:
            numbers = ir.Constant(self.integers, list(range(lanes)))
            remaining = self.splat_bits(b.trunc(b.sub(count, vectors_end), I32))
            return body(vectors_end, b.icmp_signed("<", numbers, remaining), updated)

        return self.when(b.icmp_signed("<", vectors_end, count), updated, rest)

    def transform(
        self, count: Any, dtype: int, sources: Sequence[Any], target: Any, compute: Any
    ) -> None:
        """Write ``compute(*numbers)`` of ``count`` numbers at each of the addresses ``sources``.

        All are of this dtype; what is computed are float32 vectors.
        """
        b = self.b

        def body(k: Any, mask: Any, values: list[Any]) -> list[Any]:
            along = b.mul(k, I64(BYTES[dtype]))
            numbers = [self.numbers(b.add(source, along), dtype, mask) for source in sources]
            self.write(compute(*numbers), b.add(target, along), dtype, mask)
            return values

        self.vectors(count, [], body)

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

    def fma(self, a: Any, c: Any, total: Any) -> Any:
        """Return ``a * c + total``, of numbers or vectors."""
        name = "llvm.fma.f32" if total.type == F32 else f"llvm.fma.v{self.lanes}f32"
        return self.call(name, total.type, a, c, total)

    def constant(self, number: int) -> Any:
        """Return a vector that repeats a whole number of 32 bits."""
        return _repeated(self.integers, number)

    def splat(self, value: Any) -> Any:
        """Return a vector that repeats a float32 number."""
        if isinstance(value, float):
            return ir.Constant(self.vector, [value] * self.lanes)
        return self.splat_bits(value)

    def splat_bits(self, value: Any) -> Any:
        """Return a vector that repeats a number of 32 bits."""
        undefined = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        first = self.b.insert_element(undefined, value, I32(0))
        return self.b.shuffle_vector(first, undefined, self.constant(0))

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
        bits = b.shl(b.bitcast(shifted, self.integers), self.constant(23))
        bits = b.add(bits, self.constant(127 << 23))
        return b.fmul(power, b.bitcast(bits, self.vector))


def _like(value: Any, element: Any) -> Any:
    """Return the type of as many numbers of another type."""
    return ir.VectorType(element, value.type.count) if hasattr(value.type, "count") else element


def _repeated(kind: Any, number: int) -> Any:
    """Return a constant, in every lane if the type is that of a vector."""
    return ir.Constant(kind, [number] * kind.count if hasattr(kind, "count") else number)

"""A tile of ``linear_kernel`` for bfloat16 on processors with AMX.

One instruction multiplies 16 rows of W by up to 16 rows of x along 32 numbers, in the time in which
1 KB of W is read from the L2 cache. So up to 32 rows of x cost what one does. W is read as it lies
in memory; x comes interleaved (see ``elementwise.interleaved``). Sums are float32, and are added up
in an order that depends on nothing but the number of inputs.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from skinny_kernels.tile import TileArguments, tile_function
from skinny_kernels.vectors import BFLOAT16, I8, I16, I64, VOID, Emitter

SIDE = 16  # rows of W, and rows of x, in a tile register
STEP = 32  # numbers of a row in a tile register
# Registers: sums of two by two tiles, then two tiles of W and two of x.
SUMS, WEIGHTS, INPUTS, REGISTERS = 0, 4, 6, 8
LINE = 4 * SIDE  # bytes of a row of a register


class AmxEmitter(Emitter):
    """Emits the instructions of AMX."""

    def amx(self, name: str, *arguments: Any) -> None:
        """Call an instruction; whole numbers are tile registers."""
        values = (I8(n) if isinstance(n, int) else n for n in arguments)
        self.call(f"llvm.x86.{name}", VOID, *values)

    def pointer(self, address: Any) -> Any:
        """Return an address as a pointer."""
        return self.b.inttoptr(address, I8.as_pointer())

    def configure(self, sizes: dict[int, tuple[Any, Any]]) -> None:
        """Set rows and bytes of a row, int64, of the registers."""
        b = self.b
        configuration = b.alloca(ir.ArrayType(I8, 64))
        configuration.align = 64
        b.store(ir.Constant(ir.ArrayType(I8, 64), None), configuration)
        base = b.ptrtoint(configuration, I64)
        self.store(I8(1), base, align=1)  # the only palette there is
        for register, (rows, width) in sizes.items():
            self.store(b.trunc(width, I16), b.add(base, I64(16 + 2 * register)), align=2)
            self.store(b.trunc(rows, I8), b.add(base, I64(48 + register)), align=1)
        self.amx("ldtilecfg", b.bitcast(configuration, I8.as_pointer()))


def sizes(b: Any, width: Any) -> dict[int, tuple[Any, Any]]:
    """Return rows and bytes of a row of the registers for ``width`` rows of x in a tile."""
    narrow = b.mul(width, I64(4))
    return {
        register: (I64(SIDE), I64(LINE) if WEIGHTS <= register < INPUTS else narrow)
        for register in range(REGISTERS)
    }


class AmxTile(AmxEmitter):
    """Emits the function that multiplies r tiles of W by s tiles of x, 1 or 2 each.

    Meanwhile as many other rows of W are read into the L2 cache.
    """

    def __init__(self, module: Any, r: int, s: int) -> None:
        super().__init__(module, SIDE)
        self.r, self.s = r, s

    def tile(self) -> Any:
        """Return ``void (TileArguments, n, width)``.

        bias is bfloat16, or 0; x is interleaved, and a tile of it has ``width`` rows, as the
        registers have. n is the number of rows whose products are written, at most 16 s and more
        than 16 (s - 1).
        """
        return tile_function(self, f"amx_tile_{self.r}_{self.s}", self._emit, more=2)

    def _emit(self, given: TileArguments, n: Any, width: Any) -> None:
        b = self.b
        square = ir.ArrayType(self.vector, SIDE)
        # A vector more, because rows of fewer than 16 sums are read as vectors.
        sums = b.alloca(ir.ArrayType(self.vector, SIDE + 1))
        columns = b.alloca(square)
        line = b.mul(width, I64(4))
        for register in range(SUMS, SUMS + self.r * self.s):
            self.amx("tilezero", register)

        def multiply(k: Any) -> None:
            along = b.mul(k, I64(2))
            row = b.add(given.ahead, along)
            for _ in range(SIDE * self.r):
                self.prefetch(row)
                row = b.add(row, given.w_stride)
            for r in range(self.r):
                address = b.add(self.at(given.w, I64(SIDE * r), given.w_stride), along)
                self.amx("tileloadd64", WEIGHTS + r, self.pointer(address), given.w_stride)
            for s in range(self.s):
                group = self.at(given.x, I64(SIDE * s), given.x_stride)
                address = b.add(group, b.mul(b.udiv(k, I64(2)), line))
                self.amx("tileloadd64", INPUTS + s, self.pointer(address), line)
            for r in range(self.r):
                for s in range(self.s):
                    self.amx("tdpbf16ps", SUMS + r * self.s + s, WEIGHTS + r, INPUTS + s)

        self.repeat(given.inputs, STEP, multiply)
        from_sums, from_columns = b.ptrtoint(sums, I64), b.ptrtoint(columns, I64)
        for r in range(self.r):
            added = self.bias(given.bias, 2 * SIDE * r, BFLOAT16)
            for s in range(self.s):
                self.amx("tilestored64", SUMS + r * self.s + s, self.pointer(from_sums), line)
                rows = [
                    self.load(self.at(from_sums, I64(i), line), self.vector) for i in range(SIDE)
                ]
                for i, column in enumerate(self.transposed(rows)):
                    self.store(column, b.add(from_columns, I64(LINE * i)))
                to = b.add(self.at(given.y, I64(SIDE * s), given.y_stride), I64(2 * SIDE * r))
                remaining = b.sub(n, I64(SIDE * s))
                count = b.select(b.icmp_signed("<", remaining, I64(SIDE)), remaining, I64(SIDE))

                def write(t: Any, to: Any = to, added: Any = added) -> None:
                    total = self.load(self.at(from_columns, t, I64(LINE)), self.vector)
                    self.write(b.fadd(total, added), self.at(to, t, given.y_stride), BFLOAT16)

                self.repeat(count, 1, write)

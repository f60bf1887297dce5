"""Atomic operations on int64 words in memory, and what Linux offers to threads that wait."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from skinny_kernels.vectors import I32, I64

WORD = 8  # bytes
# By machine: numbers of system calls, and the instruction of a loop that waits.
MACHINES = {"x86_64": (202, 203, 186, "pause"), "aarch64": (98, 122, 178, "yield")}
FUTEX, SET_AFFINITY, GETTID, PAUSE = MACHINES.get(platform.machine(), (0, 0, 0, ""))
# Operations of ``futex``, on addresses of this process only.
FUTEX_WAIT, FUTEX_WAKE = 128, 129


def is_available() -> bool:
    """Return whether this is Linux on a processor whose system calls are known."""
    return sys.platform == "linux" and platform.machine() in MACHINES


def function(name: str) -> int:
    """Return the address of a function of the C library."""
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def load(typing: Any, address: Any) -> Any:
    """Return the word at an address; what its writer wrote before is seen afterwards."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), "acquire", WORD)

    return types.int64(types.int64), generate


@intrinsic
def publish(typing: Any, address: Any, value: Any) -> Any:
    """Write a word; who reads it sees what was written before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "release", WORD)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _changing(operation: str) -> Any:
    """Return an intrinsic that changes the word at an address and returns what it was."""

    @intrinsic
    def change(typing: Any, address: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _pointer(builder, arguments[0])
            return builder.atomic_rmw(operation, pointer, arguments[1], "seq_cst")

        return types.int64(types.int64, types.int64), generate

    return change


# Add a number, keep some bits only, set some bits, write another word.
fetch_add, fetch_and, fetch_or, exchange = map(_changing, ("add", "and", "or", "xchg"))


@intrinsic
def replaced(typing: Any, address: Any, old: Any, new: Any) -> Any:
    """Write ``new`` to a word if it is ``old``; return whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, old, new = arguments
        result = builder.cmpxchg(_pointer(builder, address), old, new, "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Tell the processor that this thread waits in a loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.asm(kind, PAUSE, "~{memory}", [], True)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def nanoseconds(typing: Any, clock_gettime: Any) -> Any:
    """Return the time of the monotonic clock; the argument is the function's address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            spec = builder.alloca(ir.ArrayType(I64, 2))
        seconds = builder.bitcast(spec, I64.as_pointer())
        kind = ir.FunctionType(I32, [I32, I64.as_pointer()])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(function, [I32(time.CLOCK_MONOTONIC), seconds])
        whole = builder.load(seconds)
        rest = builder.load(builder.gep(seconds, [I64(1)]))
        return builder.add(builder.mul(whole, I64(10**9)), rest)

    return types.int64(types.int64), generate


@intrinsic
def current_core(typing: Any, sched_getcpu: Any) -> Any:
    """Return the number of the core that this thread runs on; the argument is the address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(I32, [])
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.sext(builder.call(function, []), I64)

    return types.int64(types.int64), generate


@intrinsic
def system_call(typing: Any, syscall: Any, number: Any, a: Any, b: Any, c: Any) -> Any:
    """Ask the kernel; the arguments are the address of ``syscall``, a number and three words."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(I64, [I64], var_arg=True)
        function = builder.inttoptr(arguments[0], kind.as_pointer())
        return builder.call(function, [*arguments[1:], I64(0), I64(0), I64(0)])

    return types.int64(*[types.int64] * 5), generate

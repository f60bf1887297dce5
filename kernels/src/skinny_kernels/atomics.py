"""Atomic operations on int64 words in memory, and what Linux offers to threads that wait."""

from __future__ import annotations

import ctypes
import platform
import sys
import time

from llvmlite import ir

from skinny_kernels.intrinsics import Truth, Word, emits, pointer_to
from skinny_kernels.vectors import I32, I64, VOID, Emitter

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


@emits
def load(emitter: Emitter, address: Word) -> Word:
    """Return the word at an address; what its writer wrote before is seen afterwards."""
    return emitter.b.load_atomic(pointer_to(emitter, address), "acquire", WORD)


@emits
def publish(emitter: Emitter, address: Word, value: Word) -> None:
    """Write a word; who reads it sees what was written before."""
    emitter.b.store_atomic(value, pointer_to(emitter, address), "release", WORD)


@emits
def fetch_add(emitter: Emitter, address: Word, number: Word) -> Word:
    """Add a number to the word at an address; return what it was."""
    return emitter.b.atomic_rmw("add", pointer_to(emitter, address), number, "seq_cst")


@emits
def fetch_and(emitter: Emitter, address: Word, bits: Word) -> Word:
    """Keep some bits of a word only; return what it was."""
    return emitter.b.atomic_rmw("and", pointer_to(emitter, address), bits, "seq_cst")


@emits
def fetch_or(emitter: Emitter, address: Word, bits: Word) -> Word:
    """Set some bits of a word; return what it was."""
    return emitter.b.atomic_rmw("or", pointer_to(emitter, address), bits, "seq_cst")


@emits
def exchange(emitter: Emitter, address: Word, word: Word) -> Word:
    """Write another word; return what it was."""
    return emitter.b.atomic_rmw("xchg", pointer_to(emitter, address), word, "seq_cst")


@emits
def replaced(emitter: Emitter, address: Word, old: Word, new: Word) -> Truth:
    """Write ``new`` to a word if it is ``old``; return whether it was."""
    pointer = pointer_to(emitter, address)
    result = emitter.b.cmpxchg(pointer, old, new, "seq_cst", "seq_cst")
    return emitter.b.extract_value(result, 1)


@emits
def pause(emitter: Emitter) -> None:
    """Tell the processor that this thread waits in a loop."""
    emitter.b.asm(ir.FunctionType(VOID, []), PAUSE, "~{memory}", [], True)


@emits
def nanoseconds(emitter: Emitter, clock_gettime: Word) -> Word:
    """Return the time of the monotonic clock; the argument is the function's address."""
    b = emitter.b
    with b.goto_entry_block():
        spec = b.alloca(ir.ArrayType(I64, 2))
    seconds = b.bitcast(spec, I64.as_pointer())
    kind = ir.FunctionType(I32, [I32, I64.as_pointer()])
    b.call(b.inttoptr(clock_gettime, kind.as_pointer()), [I32(time.CLOCK_MONOTONIC), seconds])
    whole = b.load(seconds)
    rest = b.load(b.gep(seconds, [I64(1)]))
    return b.add(b.mul(whole, I64(10**9)), rest)


@emits
def current_core(emitter: Emitter, sched_getcpu: Word) -> Word:
    """Return the number of the core that this thread runs on; the argument is the address."""
    b, kind = emitter.b, ir.FunctionType(I32, [])
    return b.sext(b.call(b.inttoptr(sched_getcpu, kind.as_pointer()), []), I64)


@emits
def system_call(
    emitter: Emitter, syscall: Word, number: Word, first: Word, second: Word, third: Word
) -> Word:
    """Ask the kernel; the arguments are the address of ``syscall``, a number and three words."""
    b, kind = emitter.b, ir.FunctionType(I64, [I64], var_arg=True)
    given = [number, first, second, third, I64(0), I64(0), I64(0)]
    return b.call(b.inttoptr(syscall, kind.as_pointer()), given)

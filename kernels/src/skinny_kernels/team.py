"""The threads that run launches: this one, and helpers that all threads of the process share."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from functools import lru_cache
from typing import Any

from numba import types

from skinny_kernels import atomics
from skinny_kernels import team_kernel as kernel
from skinny_kernels.cores import usable_cores
from skinny_kernels.machine_code import compiled_as, source
from skinny_kernels.openmp import shorten_waits
from skinny_kernels.vectors import LINE

work: Any = None  # a global of what ``compiled_as`` compiles


@lru_cache
def _functions() -> tuple[Any, Any]:
    """Return ``run`` and ``help_forever``, compiled."""
    version = source()

    def run(team: Any, tape: Any, helpers: Any) -> None:
        if version:
            work(team, tape, helpers)

    def help_forever(seat: Any) -> Any:
        if version:
            work(seat)
        return seat

    team, tape = types.voidptr, types.voidptr
    return (
        compiled_as(types.void(team, tape, types.int64), kernel.run, run),
        compiled_as(types.int64(types.int64), kernel.help_forever, help_forever),
    )


class Team:
    """Helpers, and the memory in which jobs are posted to them."""

    def __init__(self) -> None:
        words = (kernel.TEAM_BYTES + LINE) // atomics.WORD
        self._memory = (ctypes.c_int64 * words)()
        begin = ctypes.addressof(self._memory)
        self.address = -(-begin // LINE) * LINE
        self._first = (self.address - begin) // atomics.WORD
        for name in ("clock_gettime", "syscall", "sched_getcpu"):
            self._set(getattr(kernel, name.upper()), atomics.function(name))
        cores = sum(1 << core for core in os.sched_getaffinity(0))
        for word in range(kernel.CORES_BYTES // atomics.WORD):
            bits = ctypes.c_int64(cores >> 64 * word & 2**64 - 1)
            self._set(kernel.CORES + atomics.WORD * word, bits.value)
        run, self._help = _functions()
        self.run = run.ctypes
        self.helpers = 0
        self._starting = threading.Lock()
        shorten_waits()

    def _set(self, offset: int, value: int) -> None:
        self._memory[self._first + offset // atomics.WORD] = value

    def start(self, helpers: int) -> int:
        """Start helpers, so that there are as many if possible; return how many there are."""
        with self._starting:
            while self.helpers < min(helpers, kernel.MOST_HELPERS):
                if not self._start(self.helpers + 1):
                    break
                self.helpers += 1
                self._set(kernel.HELPERS, self.helpers)
        return self.helpers

    def _start(self, number: int) -> bool:
        library: Any = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        argument = ctypes.c_void_p(self.address + number)
        # Signals are for the threads of Python: a helper would leave them waiting.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            code = ctypes.c_void_p(self._help.address)
            failed = library.pthread_create(ctypes.byref(thread), None, code, argument)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if failed:
            return False
        library.pthread_detach(thread)
        return True


_lock = threading.Lock()  # while the team is made
_team: Team | None = None


def _forget() -> None:
    """Begin anew in a forked process, which has none of the helpers."""
    global _lock, _team
    _lock, _team = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def is_available() -> bool:
    """Return whether a team can be made on this machine."""
    return atomics.is_available()


def run(tape: Any, threads: int) -> None:
    """Run the launches of a tape (see ``launch.tape``) in at most so many threads."""
    team = _team or _make()
    helpers = threads - 1
    if helpers > team.helpers:
        helpers = team.start(min(threads, usable_cores()) - 1)
    team.run(team.address, tape, helpers)


def _make() -> Team:
    global _team
    with _lock:
        _team = _team or Team()
    return _team

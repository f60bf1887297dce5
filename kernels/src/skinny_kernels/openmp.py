"""Lets PyTorch's threads sleep soon after their work, for the sake of all others.

GNU's OpenMP runtime, which PyTorch's builds for Linux use, lets a thread that waits for others look
in a loop for milliseconds before it sleeps. Where programs keep the processor busy, the thread that
is waited for may not even run because of that loop. With more threads than cores, the runtime
shortens it to some microseconds in the whole process. So one thread more than there are cores is
started once, and sleeps for ever.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import torch

ENTRY = "GOMP_parallel"


def entry() -> Any:
    """Return ``GOMP_parallel`` of PyTorch's own OpenMP runtime; None where it has another one."""
    try:
        parallel: Any = getattr(ctypes.CDLL(None), ENTRY, None)  # of a preloaded runtime
        if parallel is None:
            mapped = Path("/proc/self/maps").read_text(errors="replace").split()
            folder = str(Path(torch.__file__).parent.parent)
            libraries = [name for name in mapped if "libgomp" in name]
            pytorch_libraries = [name for name in libraries if name.startswith(folder)]
            parallel = getattr(ctypes.CDLL((pytorch_libraries or libraries)[0]), ENTRY)
    except (OSError, IndexError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _nothing(data: Any) -> None:
    """Do what the sleeping threads do."""


def shorten_waits() -> None:
    """Start the threads (see above); does nothing where PyTorch has another runtime."""
    parallel = entry()
    if parallel is None:
        return
    begun = threading.Event()
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_nothing)

    def sleep() -> None:
        parallel(ctypes.cast(nothing, ctypes.c_void_p), None, len(os.sched_getaffinity(0)) + 1, 0)
        begun.set()
        threading.Event().wait()  # a team ends with the thread that it belongs to

    threading.Thread(target=sleep, name="skinny-kernels-openmp", daemon=True).start()
    begun.wait()

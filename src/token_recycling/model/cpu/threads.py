"""Threads for the kernels: those of PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

ENTRY = "GOMP_parallel"
Parallel = Callable[[int, Any, int, int], None]


@lru_cache
def openmp() -> Parallel | None:
    """Return ``GOMP_parallel`` of PyTorch's own OpenMP runtime; None where it has another one.

    A second team of threads would keep the cores busy while PyTorch's team works. Builds for Linux
    use GNU's runtime; those for macOS and Windows do not.
    """
    try:
        parallel: Any = getattr(ctypes.CDLL(None), ENTRY, None)  # of a preloaded runtime
        if parallel is None:
            mapped = Path("/proc/self/maps").read_text(errors="replace").split()
            folder = str(Path(torch.__file__).parent.parent)
            found = [name for name in mapped if "libgomp" in name]
            own = [name for name in found if name.startswith(folder)]
            parallel = getattr(ctypes.CDLL((own or found)[0]), ENTRY)
    except (OSError, IndexError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel  # type: ignore[no-any-return]

"""Kernels and their launches, in the threads of PyTorch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol, TypeVar, cast
from zlib import crc32

import numba
import torch
from numba import types
from torch import Tensor

from token_recycling.util.compiled import kept

ENTRY = "GOMP_parallel"
Function = TypeVar("Function", bound=Callable[..., Any])
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
            libraries = [name for name in mapped if "libgomp" in name]
            pytorch_libraries = [name for name in libraries if name.startswith(folder)]
            parallel = getattr(ctypes.CDLL((pytorch_libraries or libraries)[0]), ENTRY)
    except (OSError, IndexError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel  # type: ignore[no-any-return]


@lru_cache
def _source() -> int:
    """Return a checksum of the files of this folder, never 0."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return crc32(b"".join(path.read_bytes() for path in files)) or 1


work: Any = None  # a global of what ``_compile`` compiles, with another value in each


def _compile(function: Any, form: int) -> Any:
    """Compile ``function(fields, form)`` for one ``form``; machine code is kept (see ``kept``).

    Numba finds it again by the name and by the values that are closed over: ``form``, and a
    checksum, as numba itself watches one file only. ``function`` must not be one of them, since
    compiled functions are pickled differently in every process.
    """
    version = _source()

    def run(fields: Any) -> None:
        if version:
            work(fields, form)

    names = {"__name__": __name__, "work": function}
    kernel = FunctionType(run.__code__, names, closure=run.__closure__)
    kernel.__qualname__ = f"{function.py_func.__module__}.{function.py_func.__name__}"
    return kept(numba.cfunc, types.void(types.voidptr))(kernel)


class Kernel:
    """A kernel, ``void (int64 *fields)``, compiled for one dtype, format or the like.

    Attributes:
        address: of its machine code.
        call: calls it in this thread alone.
        counter: position among the fields of the first number that threads count with.
        counters: how many there are, all of which are 0 at a launch; None: up to the last field.
    """

    def __init__(
        self, function: Any, form: int, counter: int = 0, counters: int | None = 0
    ) -> None:
        """Compile ``function(fields, form)``, one of numba's, where ``form`` is a constant."""
        self._compiled = _compile(function, form)  # numba frees machine code that nobody refers to
        self.address: int = self._compiled.address
        self.call: Callable[[Any], None] = self._compiled.ctypes
        self.counter, self.counters = counter, counters


class Recorder(Protocol):
    """Records launches (see ``capture.Capture``)."""

    def add(self, kernel: Kernel, fields: Any, threads: int, held: Any) -> None:
        """Record a launch."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that the launches use again in a replay."""

    def rebind_attention(self, fields: Any, key: Tensor, value: Tensor, mask: Tensor) -> None:
        """Record that a launch reads the cache, whose extent differs from step to step."""

    def rebind_copy(self, fields: Any, layer: Any) -> None:
        """Record that a launch writes to the cache."""


class _Recording(threading.local):
    recorder: Recorder | None = None


recording = _Recording()


def unwatched(function: Function) -> Function:
    """Let a function that launches kernels call PyTorch's without a recorder's watching them."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if recording.recorder is None:
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return cast(Function, run)


def launch(kernel: Kernel, fields: Any, threads: int, held: Any = None) -> None:
    """Run a kernel.

    Args:
        kernel: the kernel.
        fields: array of int64.
        threads: that run it; 1: this thread alone.
        held: what has to live as long as ``fields`` is used.
    """
    if recording.recorder is not None:
        recording.recorder.add(kernel, fields, threads, held)
    if threads == 1:
        kernel.call(fields)
        return
    parallel = openmp()
    assert parallel is not None
    parallel(kernel.address, fields, threads, 0)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory on the CPU for a kernel's outputs."""
    if recording.recorder is not None:
        return recording.recorder.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")

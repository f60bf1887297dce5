"""Launching Triton kernels, or compiling them without a launch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_thread = threading.local()


@contextmanager
def only_compiled() -> Iterator[None]:
    """Compile the kernels that this thread launches, and run none of them."""
    _thread.compiles = True
    try:
        yield
    finally:
        _thread.compiles = False


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a Triton kernel with one program per element of ``grid``."""
    if getattr(_thread, "compiles", False):
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)

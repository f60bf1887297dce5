"""Launching Triton kernels, or compiling them without a launch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# For kernels of few programs, none of which has to leave registers to others: without this,
# NVIDIA's assembler keeps a few values in memory to use fewer registers. For at most 8 warps.
REGISTERS: dict[str, Any] = {} if torch.version.hip else {"maxnreg": 248}
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
        compiled = kernel.warmup(*args, grid=grid, **options)
        if compiled is not None and torch.cuda.is_available():
            compiled._init_handles()  # some versions compile the launcher only here
    else:
        kernel[grid](*args, **options)

"""The decorator of functions that numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile ``function`` at its first call, without the interpreter lock.

    Machine code is kept next to the source file, or in numba's folder for the user, and compiled
    anew when that file changes. Other files are not watched, so a compiled function should only
    call compiled functions of its own file. Where neither folder can be written to, it is compiled
    in every process.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        jitted: F = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba finds no folder for the machine code
        jitted = numba.njit(**options)(function)
    return jitted


def as_array(tensor: Tensor) -> Any:
    """Return a tensor on the host as a contiguous array.

    A compiled function is compiled anew for every combination of memory layouts, hence one layout.
    """
    return tensor.contiguous().numpy()

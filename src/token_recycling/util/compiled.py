"""The decorator of functions that numba compiles, and threads to run them in."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import numba
import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def kept(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
    """Return numba's ``compiler(*arguments, **options)`` that keeps machine code where it can.

    It is kept next to the source file, or in numba's folder for the user; where neither can be
    written to, code is compiled in every process.
    """

    def compile_it(function: Any) -> Any:
        try:
            return compiler(*arguments, cache=True, **options)(function)
        except RuntimeError:  # numba finds no folder for the machine code
            return compiler(*arguments, **options)(function)

    return compile_it


def compiled(function: F) -> F:
    """Compile ``function`` at its first call, without the interpreter lock.

    Machine code is kept (see ``kept``), and compiled anew when the source file changes. Other files
    are not watched, so a compiled function should only call compiled functions of its own file.
    """
    jitted: F = kept(numba.njit, nogil=True, error_model="numpy")(function)
    return jitted


def as_array(tensor: Tensor) -> Any:
    """Return a tensor on the host as a contiguous array.

    A compiled function is compiled anew for every combination of memory layouts, hence one layout.
    """
    return tensor.contiguous().numpy()


@lru_cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="token-recycling")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)


def in_threads(count: int, least: int, run: Callable[[slice], object]) -> None:
    """Call ``run`` with slices of ``range(count)``, in threads if there is enough work.

    Args:
        count: number of independent items.
        least: minimum of items per thread.
        run: releases the interpreter lock, as compiled functions do.
    """
    threads = min(torch.get_num_threads(), count // max(least, 1))
    if threads < 2:
        run(slice(0, count))
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    parts = [slice(*pair) for pair in pairwise(bounds)]
    others = [_pool().submit(run, part) for part in parts[1:]]
    run(parts[0])
    for other in others:
        other.result()

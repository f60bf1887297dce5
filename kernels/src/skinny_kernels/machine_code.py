"""Compiling kernels, and the functions that run them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any
from zlib import crc32

import numba
from numba import types

from skinny_kernels.compiled import kept
from skinny_kernels.team_kernel import claim
from skinny_kernels.vectors import processor

work: Any = None  # a global of what ``compiled_as`` compiles, with another value in each


@lru_cache
def source() -> int:
    """Return a checksum of the files of this folder, never 0."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return crc32(b"".join(path.read_bytes() for path in files)) or 1


def compiled_as(signature: Any, function: Any, wrapper: Callable[..., Any]) -> Any:
    """Compile ``wrapper``, which calls ``function`` as ``work``; machine code is kept.

    Numba finds it again by the name and by the values that are closed over, among which is a
    checksum, as numba itself watches one file only. ``function`` must not be one of them, since
    compiled functions are pickled differently in every process.
    """
    processor()  # prepares LLVM for instructions that have no name there
    names = {"__name__": __name__, "work": function, "claim": claim}
    code = FunctionType(wrapper.__code__, names, closure=wrapper.__closure__)
    code.__qualname__ = f"{function.py_func.__module__}.{function.py_func.__name__}"
    return kept(numba.cfunc, signature)(code)


PIECE = types.void(types.voidptr, types.int64, types.int64, types.int64)


class Kernel:
    """A kernel, compiled for one dtype, format or the like.

    It is called ``void (int64 *fields, int64 piece, int64 following, int64 seat)`` and computes a
    piece of a launch: pieces are numbered from 0 on, and a thread most likely computes
    ``following`` next, the number of pieces if there is none. Before it writes what other threads
    see, it claims the piece (see ``team_kernel.claim``), and returns if that is no longer possible.

    Attributes:
        address: of its machine code.
        counter: position of the first of the fields, up to the last one, that must be 0 at a
            launch; None if there is none.
    """

    def __init__(
        self, function: Any, variant: int, *, in_pieces: bool = False, counter: int | None = None
    ) -> None:
        """Compile a function of numba's, where ``variant`` is a constant.

        Args:
            function: ``function(fields, piece, following, seat, variant)``, which claims its
                piece; or ``function(fields, variant)``, all of a launch, which no thread can take.
            variant: what it is compiled for.
            in_pieces: whether it is the first.
            counter: see the attribute.
        """
        version = source()

        def one_piece(fields: Any, piece: Any, following: Any, seat: Any) -> None:
            if version:
                work(fields, piece, following, seat, variant)

        def everything(fields: Any, piece: Any, following: Any, seat: Any) -> None:
            if version and claim(seat):
                work(fields, variant)

        # Numba frees machine code that nobody refers to.
        self._compiled = compiled_as(PIECE, function, one_piece if in_pieces else everything)
        self.address: int = self._compiled.address
        self.counter = counter

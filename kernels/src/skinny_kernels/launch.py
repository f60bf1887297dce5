"""Launches of kernels, which run in a team of threads or are recorded."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from skinny_kernels import team_kernel
from skinny_kernels.machine_code import Kernel
from skinny_kernels.team import run

Function = TypeVar("Function", bound=Callable[..., Any])


class Launch(NamedTuple):
    """A launch of a kernel.

    Attributes:
        kernel: the kernel.
        fields: array of int64.
        pieces: of which it consists.
        threads: that run it.
        held: what has to live as long as ``fields`` is used.
    """

    kernel: Kernel
    fields: Any
    pieces: int = 1
    threads: int = 1
    held: Any = None


def tape(launches: Sequence[tuple[Any, ...]], fields: Any = None) -> Any:
    """Return what the team runs (see ``team_kernel.LAUNCHES``): the launches, in order.

    Args:
        launches: kernel, fields and pieces of each (see ``Launch``).
        fields: array int64 of the fields of all of them, in order; None: their own.
    """
    numbers = [len(launches)]
    begin = 0 if fields is None else fields.ctypes.data
    for kernel, own, pieces, *_ in launches:
        address, size = ctypes.addressof(own) if fields is None else begin, len(own)
        begin += 8 * size
        counter = size if kernel.counter is None else kernel.counter
        numbers += (kernel.address, address, pieces, 0, 0, address + 8 * counter, size - counter)
    return _words(len(numbers))(*numbers)


def fields_of(words: Mapping[int, int], zeros: int = 0) -> Any:
    """Return the fields of a launch, and so many zeros behind them.

    ``words``: by position, which a kernel's module has a name for; none is left out.
    """
    fields = _words(len(words) + zeros)()
    for position, word in words.items():
        fields[position] = word
    return fields


@lru_cache
def _words(count: int) -> Any:
    return ctypes.c_int64 * count


def pieces_at(number: int) -> int:
    """Return the position in a tape of the number of pieces of a launch."""
    offset = team_kernel.FIRST_LAUNCH + team_kernel.LAUNCH_BYTES * number + team_kernel.PIECES
    return offset // 8


class Recorder(Protocol):
    """Records launches (see ``capture.Capture``)."""

    def add(self, launch: Launch) -> None:
        """Record a launch."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that the launches use again in a replay."""

    def note_mask(self, packed: Tensor, kind: str | None) -> None:
        """Note the type of layers that a packed mask is for (see ``attention.Packing``)."""

    def note_angles(self, angles: Any, positions: Tensor, computed: tuple[Tensor, ...]) -> None:
        """Note what a rotary embedding has computed (see ``angles.Angles``)."""

    def rebind_attention(self, fields: Any, key: Tensor, mask: Tensor) -> None:
        """Record that a launch reads the cache, whose extent differs from step to step."""

    def rebind_copy(self, fields: Any, layer: Any) -> None:
        """Record that a launch writes to the cache."""


class _ThisThread(threading.local):
    recorder: Recorder | None = None  # of the step that is being captured


this_thread = _ThisThread()


def unwatched(function: Function) -> Function:
    """Let a function that launches kernels call PyTorch's without a recorder's watching them."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if this_thread.recorder is None:
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return cast(Function, run)


def launch(
    kernel: Kernel, fields: Any, pieces: int = 1, threads: int = 1, held: Any = None
) -> None:
    """Run a kernel (see ``Launch``)."""
    if not pieces:
        return
    if this_thread.recorder is not None:
        this_thread.recorder.add(Launch(kernel, fields, pieces, threads, held))
    run(tape(((kernel, fields, pieces),)), min(threads, pieces))


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory on the CPU for a kernel's outputs."""
    if this_thread.recorder is not None:
        return this_thread.recorder.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")

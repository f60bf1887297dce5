"""Launching Triton kernels, or collecting launches to compile what they need."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# For kernels of few programs, none of which has to leave registers to others: without this,
# NVIDIA's assembler keeps a few values in memory to use fewer registers. For at most 8 warps.
REGISTERS: dict[str, Any] = {} if torch.version.hip else {"maxnreg": 248}
_thread = threading.local()


@dataclass(frozen=True)
class KernelLaunch:
    """A launch, whose arguments are those of ``launch``."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    coalesce: bool

    @property
    def signature(self) -> Any:
        """All that a kernel is compiled for."""
        return self.kernel, _kinds(self.args), tuple(sorted(self.options.items())), self.coalesce

    def run(self) -> None:
        """Launch the kernel; compile it first if that has not been done."""
        with self._passes(), self._device():
            self.kernel[self.grid](*self.args, **self.options)

    def compile(self) -> None:
        """Compile the kernel for these arguments, unless it is in one of Triton's caches.

        Raises:
            Exception: whatever Triton and the assembler raise.
        """
        with self._passes():
            compiled = self.kernel.warmup(*self.args, grid=self.grid, **self.options)
        if compiled is not None and torch.cuda.is_available():
            compiled._init_handles()  # some versions compile the launcher only here

    def _device(self) -> AbstractContextManager[Any]:
        """Select the GPU of the first tensor; Triton launches on the current one."""
        first = next(arg for arg in self.args if isinstance(arg, Tensor))
        if not first.is_cuda or first.device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(first.device)

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """Use the passes of this kernel if it is compiled in this thread."""
        if not self.coalesce:
            _make_coalescing_optional()
        _thread.coalesce = self.coalesce
        try:
            yield
        finally:
            _thread.coalesce = True


def _kinds(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments, with dtypes in place of tensors, which may be in tuples."""
    return tuple(
        arg.dtype if isinstance(arg, Tensor) else _kinds(arg) if isinstance(arg, tuple) else arg
        for arg in args
    )


@contextmanager
def collected() -> Iterator[list[KernelLaunch]]:
    """Collect the launches of this thread in a list, and run none of them.

    Tensors may be on the device "meta": only dtypes, and numbers that Triton compiles in, count.
    """
    before = getattr(_thread, "launches", None)
    launches: list[KernelLaunch] = []
    _thread.launches = launches
    try:
        yield launches
    finally:
        _thread.launches = before


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, coalesce: bool = True, **options: Any
) -> None:
    """Run a Triton kernel with one program per element of ``grid``.

    Args:
        kernel: a ``triton.jit`` function.
        grid: numbers of programs.
        *args: of the kernel.
        coalesce: False: compile it without Triton's pass that coalesces memory accesses. That pass
            is made for large tiles: kernels that sort and compare a few hundred numbers many times
            compile four times as fast without it, and have half as many barriers.
        **options: constants of the kernel, and how it is compiled.
    """
    one = KernelLaunch(kernel, grid, args, options, coalesce)
    launches: list[KernelLaunch] | None = getattr(_thread, "launches", None)
    if launches is None:
        one.run()
    else:
        launches.append(one)


def _make_coalescing_optional() -> None:
    """Let threads with ``coalesce`` False leave the pass out; some versions may not have it."""
    with suppress(ImportError, AttributeError):
        from triton._C.libtriton import passes

        add = passes.ttgpuir.add_coalesce
        if getattr(add, "__module__", None) != __name__:

            def add_coalesce(manager: Any) -> None:
                if getattr(_thread, "coalesce", True):
                    add(manager)

            passes.ttgpuir.add_coalesce = add_coalesce

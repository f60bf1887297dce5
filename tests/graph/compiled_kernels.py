"""Compile what steps launch, for a GPU that is not here; print variants and seconds as JSON.

Standard input: a pickled ``Recorded``. First what is compiled ahead, from the model's
configuration, then what was launched. Without TRITON_INTERPRET; one thread.
"""

from __future__ import annotations

import atexit
import importlib
import json
import pickle
import sys
from collections import Counter
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch


@dataclass(frozen=True)
class Pointer:
    """A tensor among the arguments of a launch: all that Triton looks at."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        """Return an address."""
        return 0 if self.aligned else 8


@dataclass
class Recorded:
    """What a process has launched.

    Attributes:
        config: of the model.
        dtype: of its weights.
        k: candidates.
        launches: (module, kernel, grid, arguments, options, coalesce).
    """

    config: Any
    dtype: torch.dtype
    k: int
    launches: list[tuple[Any, ...]]


def pickled(kernel: Any, grid: Any, args: Any, options: Any, coalesce: bool) -> tuple[Any, ...]:
    """Return a launch without its tensors."""
    known = [
        Pointer(arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, torch.Tensor) else arg
        for arg in args
    ]
    return kernel.fn.__module__, kernel.fn.__name__, grid, known, options, coalesce


def no_gpu() -> None:
    """Compile for an H100 that is not here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from drafting.compile_device_kernels import NoGPU

    driver.set_active(NoGPU(GPUTarget("cuda", 90, 32)))


def leave() -> None:
    """Begin to compile in threads, and end the process; print the seconds until then."""
    recorded: Recorded = pickle.load(sys.stdin.buffer)
    no_gpu()
    from token_recycling.graph import compilation

    compilation.compile_ahead(recorded.config, torch.device("cpu"), recorded.dtype, recorded.k)
    print(len(compilation.compilers._threads), flush=True)
    atexit.register(lambda: print(compilation.compilers._queue.qsize()))


def main() -> None:
    """Compile, and count."""
    recorded: Recorded = pickle.load(sys.stdin.buffer)
    no_gpu()
    from drafting.compile_device_kernels import variants
    from skinny_kernels.gpu.launch import KernelLaunch
    from token_recycling import AdjacencyMatrix
    from token_recycling.drafting.adaptive import AdaptiveDrafter
    from token_recycling.graph import compilation

    torch.set_num_threads(1)
    vocabulary = recorded.config.vocab_size
    drafter = AdaptiveDrafter(AdjacencyMatrix(vocabulary, recorded.k))
    ahead = [
        *compilation.launches_of_layers(recorded.config, recorded.dtype),
        *compilation.launches_around_layers(recorded.config, recorded.dtype),
        *compilation.launches_of_drafts(drafter, vocabulary, recorded.dtype),
    ]
    seconds = {}
    for launch in ahead:
        begun = perf_counter()
        launch.compile()
        seconds[launch.kernel.__name__] = perf_counter() - begun
    kernels = {launch.kernel for launch in ahead}
    compiled = {kernel.__name__: len(variants(kernel)) for kernel in kernels}
    for module, name, grid, args, options, coalesce in recorded.launches:
        kernel = getattr(importlib.import_module(module), name)
        kernels.add(kernel)
        KernelLaunch(kernel, grid, tuple(args), options, coalesce).compile()
    launched = {kernel.__name__: len(variants(kernel)) for kernel in kernels}
    used = Counter(name for _, name, *_ in recorded.launches)
    print(json.dumps({"ahead": compiled, "all": launched, "seconds": seconds, "used": used}))


if __name__ == "__main__":
    main()

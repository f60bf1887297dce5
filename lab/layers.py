"""Times of all linear layers of a model together with few rows, relative to one row.

    python lab/layers.py [--shape 135M] [--dtype bfloat16] [--rows 1,8,16] [--way pytorch]
    python lab/layers.py --shape 1B --dtype Q4_K

The weights are random and read in turn, as in a forward: they have left the caches. Our kernels are
recorded and replayed, as a model's layers are. Numbers of rows alternate with plain reads, which
are sums of 512 MB in as many threads; figures are medians, and quartiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated

import gguf
import numpy as np
import torch
import typer
from torch.nn.functional import linear

from quantise import blocks
from script import in_turn, numbers, ratios, run, seconds_of
from skinny_kernels import team
from skinny_kernels.huge_pages import Arena
from skinny_kernels.launch import tape, this_thread
from skinny_kernels.linear import Layer, products
from skinny_kernels.packed import interleaved
from token_recycling.util.machine import processor

# hidden size, intermediate size, size of keys, layers, vocabulary; of larger models some layers
SHAPES = {
    "135M": (576, 1536, 192, 30, 49152),
    "0.5B": (896, 4864, 128, 12, 75968),
    "1B": (2048, 8192, 512, 6, 32000),
}


def shapes(hidden: int, middle: int, keys: int, layers: int, vocabulary: int):
    """Return the shapes of all weights in the order of a forward."""
    layer = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    layer += [(middle, hidden), (middle, hidden), (hidden, middle)]
    return layer * layers + [(vocabulary, hidden)]


class Recorder:
    """Launches of kernels, and their memory (see ``launch.Recorder``)."""

    def __init__(self) -> None:
        self.launches, self.memory = [], []

    def add(self, launch) -> None:
        """Record a launch."""
        self.launches.append(launch)

    def empty(self, shape, dtype):
        """Return memory that stays."""
        self.memory.append(torch.empty(shape, dtype=dtype))
        return self.memory[-1]


def recorded(weights: list[Layer], inputs: dict[int, torch.Tensor]) -> Callable[[], object]:
    """Return a function that multiplies all layers again, without Python between them."""
    recorder = this_thread.recorder = Recorder()
    try:
        for layer in weights:
            products(inputs[layer.inputs], [layer])
    finally:
        this_thread.recorder = None
    launches = tape([launch[:3] for launch in recorder.launches])
    return lambda: (team.run(launches, torch.get_num_threads()), recorder)


def packed(kind: str, sizes: list[tuple[int, int]]) -> list[Layer]:
    """Return random layers in a block format, in huge pages."""
    form, draws = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    of, size = gguf.GGML_QUANT_SIZES[form]
    arena = Arena([outputs * inputs // of * size for outputs, inputs in sizes])
    found = []
    for outputs, inputs in sizes:
        data = torch.from_numpy(blocks(form, outputs, inputs, draws))
        weight = interleaved(data, int(form), new=arena.new)
        found.append(Layer(weight, None, int(form), outputs))
    return found


def main(
    shape: str = "135M",
    dtype: Annotated[str, typer.Option(help="of PyTorch, or a type of GGUF")] = "float32",
    rows: Annotated[str, typer.Option(help="numbers of rows")] = "1,2,4,8,12,16,32",
    threads: int = 2,
    way: Annotated[str, typer.Option(help="kernel or pytorch")] = "kernel",
    rounds: int = 9,
) -> None:
    """Measure."""
    torch.set_num_threads(threads)
    sizes, kind = shapes(*SHAPES[shape]), getattr(torch, dtype, None)
    weights = (
        packed(dtype, sizes) if kind is None else [Layer(torch.randn(s).to(kind)) for s in sizes]
    )
    plain = torch.ones(2**27)

    def multiply(n: int) -> Callable[[], object]:
        given = (torch.randn(n, width) for width in {layer.inputs for layer in weights})
        inputs = {x.shape[1]: x.to(kind or torch.float32) for x in given}
        if way == "kernel":
            return recorded(weights, inputs)
        return lambda: [linear(inputs[layer.inputs], layer.weight) for layer in weights]

    with torch.inference_mode():
        ways = {0: plain.sum} | {n: multiply(n) for n in numbers(rows)}
        times = in_turn({n: partial(seconds_of, way) for n, way in ways.items()}, rounds)
    reads = plain.nbytes / median(times.pop(0))
    first, found = next(iter(times.items()))
    size = sum(layer.weight.nbytes for layer in weights)
    print(f"{processor()}, {threads} threads, {shape}, {dtype}, {way}: {size / 1e9:.2f} GB")
    print(
        f"plain read {reads / 1e9:.1f} GB/s, {first} row(s) {size / median(found) / 1e9:.1f} GB/s"
    )
    for n, taken in times.items():
        print(f"{n:4} rows {1e3 * median(taken):7.1f} ms, c = {ratios(taken, found)}")


if __name__ == "__main__":
    run(main)

"""Times of all linear layers of a model together with few rows, relative to the kernel's one row.

    python lab/layers.py [--shape 135M] [--dtype bfloat16] [--rows 1,8,16] [--way pytorch]
    python lab/layers.py --shape 1B --dtype Q4_K

The weights are random and read in turn, as in a forward: they have left the caches. Our kernels are
recorded and replayed, as a model's layers are. Numbers of rows alternate with plain reads, which
are sums of 512 MB in as many threads; figures are medians.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Annotated

import gguf
import numpy as np
import torch
import typer
from torch.nn.functional import linear

from random_gguf import blocks
from skinny_kernels.huge_pages import Arena
from skinny_kernels.launch import recording, tape
from skinny_kernels.linear import Layer, products
from skinny_kernels.packed import interleaved
from skinny_kernels.team import run
from token_recycling.util.machine import processor

# hidden size, intermediate size, size of keys, layers, vocabulary; of larger models some layers
SHAPES = {
    "135M": (576, 1536, 192, 30, 49152),
    "0.5B": (896, 4864, 128, 12, 75968),
    "1B": (2048, 8192, 512, 6, 32000),
}
ROUNDS = 9


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


def recorded(weights: list[Layer], inputs: dict[int, torch.Tensor]):
    """Return a function that multiplies all layers again, without Python between them."""
    recorder = recording.recorder = Recorder()
    try:
        for layer in weights:
            products(inputs[layer.inputs], [layer])
    finally:
        recording.recorder = None
    numbers = tape([launch[:3] for launch in recorder.launches])
    threads = torch.get_num_threads()
    return lambda: (run(numbers, threads), recorder)


def packed(kind: str, sizes: list[tuple[int, int]]) -> list[Layer]:
    """Return random layers in a block format, in huge pages."""
    form, draws = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    numbers, size = gguf.GGML_QUANT_SIZES[form]
    arena = Arena([outputs * inputs // numbers * size for outputs, inputs in sizes])
    return [
        Layer(
            interleaved(torch.from_numpy(blocks(form, *one, draws)), int(form), new=arena.new),
            None,
            int(form),
            one[0],
        )
        for one in sizes
    ]


def main(
    shape: str = "135M",
    dtype: str = "float32",
    rows: Annotated[str, typer.Option(help="numbers of rows")] = "1,2,4,8,12,16,32",
    threads: int = 2,
    way: Annotated[str, typer.Option(help="kernel or pytorch")] = "kernel",
) -> None:
    """Measure."""
    torch.set_num_threads(threads)
    numbers, sizes = [int(n) for n in rows.split(",")], shapes(*SHAPES[shape])
    kind = getattr(torch, dtype, None)
    weights = (
        packed(dtype, sizes)
        if kind is None
        else [Layer(torch.randn(one).to(kind)) for one in sizes]
    )
    plain = torch.ones(2**27)
    times: dict[int, list[float]] = {n: [] for n in (0, *numbers)}
    with torch.inference_mode():
        ways = {0: plain.sum}
        for n in numbers:
            given = (torch.randn(n, layer.inputs) for layer in weights)
            inputs = {x.shape[1]: x.to(kind or torch.float32) for x in given}
            ways[n] = (
                recorded(weights, inputs)
                if way == "kernel"
                else lambda inputs=inputs: [linear(inputs[w.inputs], w.weight) for w in weights]
            )
        for _ in range(ROUNDS):
            for n, multiply in ways.items():
                begin = perf_counter()
                multiply()
                times[n].append(perf_counter() - begin)
    reads = plain.nbytes / median(times.pop(0))
    one = median(times[numbers[0]])
    size = sum(layer.weight.nbytes for layer in weights)
    print(f"{processor()}, {threads} threads, {shape}, {dtype}, {way}: {size / 1e9:.2f} GB")
    print(f"plain read {reads / 1e9:.1f} GB/s, {numbers[0]} row(s) {size / one / 1e9:.1f} GB/s")
    for n, found in times.items():
        low, high = sorted(found)[2], sorted(found)[-3]
        middle = median(found)
        print(
            f"{n:4} rows {1e3 * middle:7.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f}),"
            f" c = {middle / one:.2f}"
        )


if __name__ == "__main__":
    typer.run(main)

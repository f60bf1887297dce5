"""Times of all linear layers of a model together with few rows, relative to the kernel's one row.

    python lab/layers.py [--shape 135M] [--dtype bfloat16] [--rows 1,8,16] [--way pytorch]

The weights are random and read in turn, as in a forward: they have left the caches. Numbers of
rows alternate; figures are medians. A plain read is the sum of 512 MB, in as many threads.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Annotated

import torch
import typer
from torch.nn.functional import linear

from token_recycling.model.cpu.linear import product
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


def plain_read() -> float:
    """Return the most bytes per second that a plain sum reads."""
    numbers = torch.ones(2**27)
    times = []
    for _ in range(ROUNDS):
        begin = perf_counter()
        numbers.sum()
        times.append(perf_counter() - begin)
    return numbers.nbytes / min(times)


def main(
    shape: str = "135M",
    dtype: str = "float32",
    rows: Annotated[str, typer.Option(help="numbers of rows")] = "1,2,4,8,12,16,32",
    threads: int = 2,
    way: Annotated[str, typer.Option(help="kernel or pytorch")] = "kernel",
) -> None:
    """Measure."""
    torch.set_num_threads(threads)
    numbers, kind = [int(n) for n in rows.split(",")], getattr(torch, dtype)
    weights = [torch.randn(one).to(kind) for one in shapes(*SHAPES[shape])]
    sizes = {weight.shape[1] for weight in weights}
    multiply = product if way == "kernel" else linear
    times: dict[int, list[float]] = {n: [] for n in numbers}
    with torch.inference_mode():
        reads = plain_read()
        inputs = {n: {size: torch.randn(n, size).to(kind) for size in sizes} for n in numbers}
        for _ in range(ROUNDS):
            for n in numbers:
                begin = perf_counter()
                for weight in weights:
                    multiply(inputs[n][weight.shape[1]], weight)
                times[n].append(perf_counter() - begin)
    one = median(times[numbers[0]])
    size = sum(weight.nbytes for weight in weights)
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

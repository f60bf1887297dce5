"""Times of linear layers with few rows on this CPU, relative to PyTorch's with one row.

    python lab/linear.py [--dtype bfloat16] [--threads 2] [--out FILE]

The shapes are those of SmolLM2-135M and Qwen2.5-0.5B. Weights are read in turn, so many that they
have left the caches. PyTorch and the kernel alternate; figures are ratios of medians.
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import linear

from skinny_kernels.linear import product
from token_recycling.util.machine import describe

SHAPES = (
    (576, 576),
    (192, 576),
    (1536, 576),
    (576, 1536),
    (49152, 576),
    (896, 896),
    (128, 896),
    (4864, 896),
    (896, 4864),
)
ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
BYTES = 2**27  # of different weights
ROUNDS = 9


def measure(shape, rows, dtype):
    """Return the times in seconds of ``linear`` with one row, and of both ways with these rows."""
    outputs, inputs = shape
    count = max(2, BYTES // (outputs * inputs * dtype.itemsize))
    weights = [torch.randn(shape).to(dtype) for _ in range(min(count, 200))]
    one, many = (torch.randn(n, inputs).to(dtype) for n in (1, rows))
    times = [[], [], []]
    per_round = max(1, len(weights) // ROUNDS)
    turn = cycle(weights)
    for _ in range(ROUNDS):
        for found, (way, x) in zip(times, ((linear, one), (linear, many), (product, many))):
            for _ in range(per_round):
                weight = next(turn)
                before = perf_counter()
                way(x, weight)
                found.append(perf_counter() - before)
    return [median(found) for found in times]


def main():
    """Measure every shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", help="such as 576x576,192x576")
    parser.add_argument("--rows", help="such as 1,8,16")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype = getattr(torch, asked.dtype)
    shapes = SHAPES
    if asked.shapes:
        shapes = [tuple(map(int, one.split("x"))) for one in asked.shapes.split(",")]
    sizes = tuple(map(int, asked.rows.split(","))) if asked.rows else ROWS
    found = []
    print("shape         way    ", *(f"{rows:>5}" for rows in sizes))
    with torch.inference_mode():
        for shape in shapes:
            lines = {"torch": [], "kernel": []}
            for rows in sizes:
                one, torchs, ours = measure(shape, rows, dtype)
                lines["torch"].append(torchs / one)
                lines["kernel"].append(ours / one)
                found.append({"shape": shape, "rows": rows, "torch_one": one,
                              "torch": torchs, "kernel": ours})  # fmt: skip
            for way, ratios in lines.items():
                name = "x".join(map(str, shape))
                print(f"{name:13} {way:7}", *(f"{ratio:5.2f}" for ratio in ratios), flush=True)
    if asked.out:
        data = {"machine": describe(torch.device("cpu")), "dtype": asked.dtype, "times": found}
        asked.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Times of attention of few tokens on this CPU, relative to PyTorch's (``packed_attention``).

    python lab/attention.py [--dtype bfloat16] [--threads 2] [--out FILE]

The shapes are those of SmolLM2-135M, Qwen2.5-0.5B and Llama-3-8B: query heads, heads of keys, size.
Caches are read in turn, so many that they have left the processor's. PyTorch and the kernel
alternate; figures are medians in milliseconds, and the ratio.
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from skinny_kernels.attention import attend, pack_mask
from token_recycling.util.machine import describe

SHAPES = ((9, 3, 64), (14, 2, 64), (32, 8, 128))
TOKENS = (1, 2, 4, 8, 16, 32, 64)
SLOTS = (300, 1000, 4000)
BYTES = 2**27  # of different keys and values
ROUNDS = 15


def measure(heads, key_heads, size, tokens, slots, dtype):
    """Return the times in seconds of PyTorch, with packed queries, and of the kernel."""
    count = max(2, BYTES // (2 * key_heads * slots * size * dtype.itemsize))
    caches = cycle(
        [torch.randn(2, 1, key_heads, slots, size).to(dtype) for _ in range(min(count, 60))]
    )
    group = heads // key_heads
    query = torch.randn(1, heads, tokens, size).to(dtype)
    queries = query.reshape(1, key_heads, group * tokens, size)
    mask = torch.zeros(1, 1, tokens, slots, dtype=dtype)
    committed = torch.tensor([slots - tokens])
    repeated, packed = mask.repeat(1, 1, group, 1), pack_mask(mask, committed, group)

    def torchs(key, value):
        found = sdpa(queries, key, value, attn_mask=repeated)
        return found.reshape(1, heads, tokens, size).transpose(1, 2).contiguous()

    def ours(key, value):
        return attend(query, key, value, packed, committed, size**-0.5)

    times = {torchs: [], ours: []}
    for _ in range(ROUNDS):
        for way, found in times.items():
            key, value = next(caches)
            before = perf_counter()
            way(key, value)
            found.append(perf_counter() - before)
    return [median(found) for found in times.values()]


def main():
    """Measure every shape, number of tokens and length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    dtype = getattr(torch, asked.dtype)
    found = []
    print("shape        slots ", *(f"{tokens:>16}" for tokens in TOKENS))
    with torch.inference_mode():
        for shape in SHAPES:
            for slots in SLOTS:
                cells = []
                for tokens in TOKENS:
                    torchs, ours = (1e3 * one for one in measure(*shape, tokens, slots, dtype))
                    cells.append(f"{torchs:6.3f} {ours:6.3f} {ours / torchs:.2f}")
                    about = {"shape": shape, "slots": slots, "tokens": tokens}
                    found.append(about | {"pytorch_ms": torchs, "kernel_ms": ours})
                print(f"{'x'.join(map(str, shape)):12} {slots:5}  ", "  ".join(cells), flush=True)
    if asked.out:
        about = {"machine": describe(), "dtype": asked.dtype, "threads": asked.threads}
        asked.out.write_text(json.dumps({**about, "times": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Compile the Triton kernels for GPUs that are not here; print registers and shared memory.

python tests/drafting/compile_device_kernels.py [NAME…]    (make test-device-kernels)

NAME…: only kernels whose names contain one of them.

What is compiled is what steps launch, with the arguments that these have, for several models and
numbers of candidates. Exits with 1 if a kernel does not compile or keeps more than ``FEW`` bytes of
its registers in memory (spills).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from transformers import LlamaConfig
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from skinny_kernels.gpu import attention_launch
from skinny_kernels.gpu.attention import TreeView
from skinny_kernels.gpu.attention_launch import Pages, attend_pages
from skinny_kernels.gpu.cache_kernel import move
from skinny_kernels.windows import AttentionWindow
from token_recycling import AdjacencyMatrix
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.kernels.device.requests import follow, place
from token_recycling.graph import compilation, kernels
from token_recycling.integrations.vllm.device_requests import DeviceRequests

TARGETS = [GPUTarget("cuda", version, 32) for version in (75, 80, 90, 100)]
TARGETS.append(GPUTarget("hip", "gfx942", 64))
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
VOCABULARY = 128_256
# Of a thread: NVIDIA's assembler keeps a few values in memory to use fewer registers.
FEW = 32


class NoGPU:
    """What Triton's launcher asks of a driver before it compiles, for a GPU that is not here."""

    def __init__(self, target):
        self.target = target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


def llama(heads=32, shared=8, size=128, hidden=4096, **options):
    """The configuration of a model, which has Llama 3 8B's shape by default."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=14336,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        head_dim=size,
        **options,
    )


@contextmanager
def memory(size):
    """Let GPUs have so many bytes of shared memory."""
    with patch.object(attention_launch, "shared_memory", lambda device: size):
        yield


def launches_of_requests(k, dtype):
    """What a step of an engine launches for trees and chains, with texts of its own dtype."""
    on = {"device": torch.device("meta")}
    drafter = AdaptiveDrafter(AdjacencyMatrix(VOCABULARY, k), 16)
    context = torch.zeros((8, 128), dtype=torch.int32, **on)
    requests = DeviceRequests(drafter, context, 17)
    states, numbers = torch.zeros(8, dtype=torch.long, **on), torch.zeros(8, **on).int()
    with compilation.collected() as found:
        best = requests.best(torch.zeros((8, VOCABULARY), dtype=dtype, **on))
        requests.learn(states, numbers, numbers, numbers, numbers, best)
        requests.propose(states, states)
        place(
            *(states, requests.draft, numbers, numbers, states),
            *(torch.zeros(shape, **on).int() for shape in ((8, 17, 17), (8, 17))),
        )
        followed = follow(
            *(states, requests.branches, requests.draft, states, states),
            *(states, numbers, numbers, 7),
        )
        cache = torch.zeros((9, 8, 16, 256), dtype=dtype, **on)
        move(states, cache, states, numbers, numbers, followed.counts, followed.sources)
    return found


def launches_of_pages(heads, size, dtype):
    """What an engine's layer launches for trees."""
    on = {"device": torch.device("meta")}
    numbers = torch.zeros(9, **on).int()
    paths, depths = (torch.zeros(shape, **on).int() for shape in ((8, 64, 64), (8, 64)))
    positions, cache = torch.zeros(512, **on).long(), torch.zeros((9, 8, 16, 2 * size), **on)
    key, value = cache.to(dtype).split(size, dim=-1)
    query = torch.zeros((512, heads, size), dtype=dtype, **on)
    view = TreeView(numbers, positions, paths, depths, AttentionWindow("full"))
    pages = Pages(numbers, torch.zeros((8, 99), **on).int(), 64, 1584)
    with compilation.collected() as found:
        attend_pages(query, key, value, view, 0.1, torch.zeros_like(query), pages)
    return found


def launches(dtype):
    """(name, launch) of every kernel and shape."""
    for k in (8, 12, 16):
        drafter = AdaptiveDrafter(AdjacencyMatrix(VOCABULARY, k))
        for launch in compilation.launches_of_drafts(drafter, VOCABULARY, dtype):
            yield f"k={k}", launch
        for launch in launches_of_requests(k, dtype):
            yield f"k={k} engine", launch
    shapes = [(heads, size, 0) for heads, size in product((8, 32), (64, 128, 256))]
    for heads, size, room in [*shapes, (32, 128, attention_launch.LARGE_MEMORY)]:
        for window in ({}, {"sliding_window": 512, "layer_types": ["sliding_attention"]}):
            config = llama(heads, size=size, hidden=heads * size, num_hidden_layers=1, **window)
            rule = "sliding" if window else "full"
            with memory(room):
                for launch in compilation.launches_of_layers(config, dtype):
                    yield f"H={heads} D={size} {rule}" + " large" * bool(room), launch
                if not (window or room):
                    for launch in launches_of_pages(heads, size, dtype):
                        yield f"H={heads} D={size} pages", launch
            for launch in compilation.launches_around_layers(config, dtype):
                yield f"H={heads} D={size} {rule}", launch
    with compilation.collected() as found:  # drafts of the host may be as large
        draft = compilation.chains(torch.zeros((1, 257), dtype=torch.long, device="meta"))
        kernels.accept(draft, draft.tokens, draft.tokens[:, 0])
    yield "n=257", *found


def resources(compiled, target):
    """(registers, bytes of registers kept in memory) per thread of a compiled kernel."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text).group(1))
        return registers, int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text).group(1))
    tool = TOOLS / ("ptxas-blackwell" if target.arch >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.asm["ptx"])
        architecture = re.search(r"^\.target (sm_\w+)", compiled.asm["ptx"], re.MULTILINE).group(1)
        command = [tool, "-v", f"--gpu-name={architecture}", source, "-o", Path(folder) / "kernel"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", text).group(1)
    spilled = re.search(r"(\d+) bytes spill stores", text).group(1)
    return int(registers), int(spilled)


def variants(kernel):
    """The variants of a kernel that have been compiled."""
    return [one for cache in kernel.device_caches.values() for one in cache[0].values()]


def main():
    failed = 0
    print(f"{'kernel':15} {'shape':25} {'target':11} {'registers':>9} {'shared':>7} {'spilled':>7}")
    for target in TARGETS:
        driver.set_active(NoGPU(target))
        seen = set()
        # Turing has no bfloat16
        for name, launch in launches(torch.float16 if target.arch == 75 else torch.bfloat16):
            kernel = launch.kernel
            if kernel not in seen:
                kernel.device_caches.clear()
                seen.add(kernel)
            if kernel.__name__ in ("attend_kernel", "combine_kernel") and target.arch == 75:
                continue  # PyTorch's kernel is used there
            if sys.argv[1:] and not any(part in kernel.__name__ for part in sys.argv[1:]):
                continue
            if target.backend == "hip":
                launch.options.pop("maxnreg", None)
            before = variants(kernel)
            launch.compile()
            for compiled in variants(kernel)[len(before) :]:
                registers, spilled = resources(compiled, target)
                failed += spilled > FEW
                print(
                    f"{kernel.__name__:15} {name:25} {target.backend + ' ' + str(target.arch):11} "
                    f"{registers:9} {compiled.metadata.shared:7} {spilled:7}",
                    flush=True,
                )
    if failed:
        print(f"{failed} kernels keep more than {FEW} bytes of their registers in memory")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

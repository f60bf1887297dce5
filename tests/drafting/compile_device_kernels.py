"""Compile the Triton kernels for GPUs that are not here; print registers and shared memory.

python tests/drafting/compile_device_kernels.py [NAME…]    (make test-device-kernels)

NAME…: only kernels whose names begin so.

Exits with 1 if a kernel does not compile or keeps registers in memory (spills), but for ``KNOWN``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from architectures import make
from token_recycling import TokenRecycling
from token_recycling.drafting.draft import chains
from token_recycling.drafting.kernels.device import count, learn, propose, top_k
from token_recycling.graph import kernels
from token_recycling.graph.step import GraphStep, StepSpec
from token_recycling.model.gpu import attention_kernel, attention_launch, elementwise_kernel
from token_recycling.util.launch import REGISTERS, only_compiled

TARGETS = [GPUTarget("cuda", version, 32) for version in (75, 80, 90, 100)]
TARGETS.append(GPUTarget("hip", "gfx942", 64))
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Bytes that NVIDIA's assembler keeps in memory so that more programs fit on a multiprocessor.
KNOWN = {}
ATTENTION = (attention_kernel.attend_kernel, attention_kernel.combine_kernel)
DRAFTING = (propose._propose, count._count, learn._remember, learn._learn)  # may use many registers
POINTERS = {
    "context": "*i64",
    "lengths": "*i64",
    "roots": "*i64",
    "chain": "*i64",
    "counts": "*i64",
    "runs": "*i64",
    "candidates": "*i32",
    "probabilities": "*i16",
    "keys": "*i64",
    "weights": "*fp32",
    "exact": "*fp64",
    "logits": "*fp32",
    "classes": "*i32",
    "root_ids": "*i32",
    "root_p": "*i16",
    "rejected": "*i1",
    "evidence": "*fp32",
    "rates": "*fp32",
    "valid": "*i1",
    "valid_out": "*i1",
    "ancestors": "*i1",
    "ancestors_out": "*i1",
    "scores_out": "*fp32",
    **dict.fromkeys(("maxima", "maxima_out"), "*fp32"),
    "values_out": "*bf16",
    "values": "*bf16",
    "mask_out": "*bf16",
    "like": "*bf16",
    **dict.fromkeys(("query", "key", "value"), "*bf16"),
    **dict.fromkeys(("tops", "totals", "parts"), "*fp32"),
    **dict.fromkeys(("paths", "depths"), "*i32"),
    **dict.fromkeys(("x", "weight", "out", "gate", "up", "cos", "sin"), "*bf16"),
    **dict.fromkeys(("query_out", "key_out"), "*bf16"),
    "epsilon": "fp32",
    "scale": "fp32",
    "learning_rate": "fp32",
    "old_weight": "fp32",
    "lowest": "fp32",
    "most": "i64",
}
NUMBERS = (
    "V",
    "P",
    "T",
    "w",
    "c",
    "n",
    "p",
    "t",
    "s",
    "max_depth",
    "longest_chain",
    "batch",
    "features",
    "total",
)
STRIDES = tuple(f"{a}_{b}" for a in ("query", "key", "value") for b in ("row", "head", "slot"))
STRIDES += tuple(f"{a}_{b}" for a in ("query", "key", "cos", "sin") for b in ("row", "token"))
STRIDES += tuple(f"{a}_out_{b}" for a in ("query", "key") for b in ("row", "head", "token"))
STRIDES += ("query_node",)
NUMBERS += ("tokens", "size", "heads", "spans", "tiles", "count", *STRIDES)


def variants():
    """(name, kernel, constants, warps, or options of a launch)"""
    for k, n in product((8, 12, 16), (1, 2, 16, 64)):
        width, nodes = triton.next_power_of_2(k), max(triton.next_power_of_2(n), 2)
        constants = {"K": k, "WIDTH": width, "NODES": nodes, "CHAIN": 16}
        constants["ROUND"] = propose.nodes_per_round(n, width)
        yield f"propose k={k} n={n}", propose._propose, constants, propose.PROPOSE_WARPS
    for k in (8, 12, 16):
        width = triton.next_power_of_2(k)
        constants = {"K": k, "WIDTH": width, "STEPS": 32}
        yield f"count k={k}", count._count, constants, count.COUNT_WARPS
        constants = {"K": k, "WIDTH": width, "BLOCK": learn.MOST_AT_ONCE}
        yield f"learn k={k}", learn._learn, constants, learn.LEARN_WARPS
        for n in (2, 16, 64, 257):
            constants = {"K": k, "WIDTH": width, "NODES": triton.next_power_of_2(n)}
            yield f"remember k={k} n={n}", learn._remember, constants, learn.REMEMBER_WARPS
        constants = {"K": k, "WIDTH": width, "BLOCK": learn.MOST_AT_ONCE}
        # Triton compiles an argument of 1 in.
        constants |= {"STEPS": 32, "P": 1, "T": 1, "batch": 1}
        del constants["BLOCK"]
        yield f"count ones k={k}", count._count, constants, count.COUNT_WARPS
    constants = {"K": 8, "WIDTH": 8, "NODES": 16, "ROUND": 8, "CHAIN": 16, "P": 1, "T": 1}
    yield "propose ones", propose._propose, constants, propose.PROPOSE_WARPS
    for n in (2, 16, 128, 512):
        yield f"accept n={n}", kernels._accept, {"NODES": n, "STEPS": 32}, 1
    for rule in range(3):
        constants = {"RULE": rule, "ROWS": 8, "BLOCK": kernels.SLOTS_AT_ONCE}
        yield f"layout rule={rule}", kernels._layout, constants, 4
    shapes = [(*shape, 0) for shape in product((1, 4), (64, 128, 256), range(3))]
    for group, size, rule, memory in (*shapes, (4, 128, 0, 2**17)):
        how = attention_launch.blocks(size, torch.bfloat16, memory)
        name = f"G={group} D={size} rule={rule}" + " large" * (memory > 0)
        own = {"GROUP": group, "D": size, "WIDTH": size, "RULE": rule, "PRECISION": "ieee"}
        own |= {name: getattr(attention_launch, name) for name in ("BLOCK", "SPAN", "OCTAVE")}
        own |= {"QUERIES": how.queries, "KEYS": how.keys, "ROWS": 4}
        own |= {"PATH_QUERIES": 16, "PATH_KEYS": attention_launch.PATH_KEYS}
        options = {"num_warps": how.warps, "num_stages": how.stages}
        yield f"attend {name}", attention_kernel.attend_kernel, own, options
    for group, size in product((1, 4), (64, 128, 256)):
        own = {"GROUP": group, "D": size, "WIDTH": size, "SPANS": 32}
        for name in ("BLOCK", "SPAN", "OCTAVE", "COMBINED", "UNROLLED"):
            own[name] = getattr(attention_launch, name)
        yield f"combine G={group} D={size}", attention_kernel.combine_kernel, own, 4
    for n in (2, 64):
        yield f"paths n={n}", attention_kernel.paths_kernel, {"NODES": n}, 1
    for k in (8, 12, 16):
        own = {"K": k, "WIDTH": triton.next_power_of_2(k), "BLOCK": top_k.BLOCK, "BLOCKS": 2048}
        yield f"choose k={k}", top_k._choose, own, 4
    for size in (64, 576, 4096, 16384):
        own = {"ADDED": 0.0, "BLOCK": triton.next_power_of_2(size)}
        warps = elementwise_kernel.norm_warps(own["BLOCK"])
        yield f"norm size={size}", elementwise_kernel._rms_norm, own, warps
    for size in (64, 96, 128):
        own = {"HALF": size // 2, "WIDTH": triton.next_power_of_2(size // 2)}
        yield f"rotary size={size}", elementwise_kernel._rotary, own, 1
    yield "gated", elementwise_kernel._gated, {"BLOCK": elementwise_kernel.GATED_BLOCK}, 4
    yield "maxima", top_k._maxima, {"BLOCK": top_k.BLOCK, "MANY": top_k.MANY}, 4
    yield "commit", kernels._commit, {"ROWS": 8, "BLOCK": 1024}, 4


def signature(kernel, constants, target):
    """The types of a kernel's arguments."""
    found = {}
    half = "*fp16" if target.arch == 75 else "*bf16"  # Turing has no bfloat16
    for name in kernel.arg_names:
        if name in constants:
            found[name] = "constexpr"
        elif name == "logits" and kernel in (top_k._choose, top_k._maxima):
            found[name] = half
        elif name in NUMBERS and not (kernel is kernels._layout and name == "most"):
            found[name] = "i32"
        else:
            found[name] = POINTERS.get(name, "*i64").replace("*bf16", half)
    return found


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


def compile_by_launcher(target):
    """Compile what a step launches, with the arguments that it has, by the path of a launch."""
    launched = (*DRAFTING, kernels._layout, kernels._accept, kernels._commit)
    launched += (top_k._maxima, top_k._choose, attention_kernel.paths_kernel)
    launched += ATTENTION
    elementwise = elementwise_kernel
    launched += (elementwise._rms_norm, elementwise._rotary, elementwise._gated)
    driver.set_active(NoGPU(target))
    for kernel in launched:
        kernel.device_caches.clear()
    recycler = TokenRecycling(make("gemma3"), graph=False, nodes=15)
    recycler.generate([3, 5, 7], max_new_tokens=3)
    dtype = torch.float16 if target.arch == 75 else torch.bfloat16
    step = GraphStep(recycler.target, recycler.drafter, StepSpec(1, 256, 16, kernels=True))
    step.drafting.compile(dtype)
    # Triton compiles arguments of 1 in, as where one node is drafted.
    step = GraphStep(recycler.target, recycler.drafter, StepSpec(1, 256, 1, kernels=True))
    step.drafting.compile(dtype)
    draft = chains(torch.zeros(1, 16, dtype=torch.long))
    query, key = torch.zeros(1, 8, 16, 64, dtype=dtype), torch.zeros(1, 2, 256, 64, dtype=dtype)
    windows = recycler.target.windows
    with only_compiled():
        elementwise.rms_norm(query, query[0, 0, 0], 1e-5)
        elementwise.rotary(query, key[:, :, :16], query[:, 0], query[:, 0])
        elementwise.gated(query, query)
        positions, _, _ = kernels.layout(windows, step.cache.lengths, draft, 256, None, dtype)
        kernels.accept(draft, draft.tokens, step.roots)
        kernels.commit(step.cache, draft.parents, step.roots)
        seen = (step.cache.lengths, positions, draft.ancestors, windows.values())
        for view in attention_launch.view_tree(*seen):
            attention_launch.attend(query, key, key, view, 0.1)
    for kernel in launched:
        (found,) = (cache[0] for cache in kernel.device_caches.values())
        assert found, f"{kernel.__name__} was not compiled"
        assert all("cubin" in one.asm for one in found.values())


def main():
    failed = 0
    for target in TARGETS if not sys.argv[1:] else ():
        if target.backend == "cuda":  # options of a launch follow the installed PyTorch
            compile_by_launcher(target)
            print(f"by the launcher for sm_{target.arch}: compiled", flush=True)
    print(f"{'kernel':22} {'target':12} {'warps':>5} {'registers':>9} {'shared':>7} {'spilled':>7}")
    for name, kernel, constants, warps in variants():
        if not name.startswith(tuple(sys.argv[1:]) or ""):
            continue
        for target in TARGETS:
            if kernel in ATTENTION and target.arch == 75:
                continue  # PyTorch's kernel is used there
            options = warps if isinstance(warps, dict) else {"num_warps": warps}
            if target.backend == "cuda" and kernel in DRAFTING:
                options |= REGISTERS
            types = signature(kernel, constants, target)
            # Triton sees at a launch that tensors begin at multiples of 16 bytes, and that the
            # strides of heads, whose sizes are multiples of 16, are so too.
            aligned = {
                (at,): [["tt.divisibility", 16]]
                for at, (name_of, kind) in enumerate(types.items())
                if kind.startswith("*") or name_of in STRIDES
            }
            source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
            compiled = triton.compile(source, target=target, options=options)
            registers, spilled = resources(compiled, target)
            failed += spilled > KNOWN.get((name, target.arch), 0)
            print(
                f"{name:22} {target.backend + ' ' + str(target.arch):12} "
                f"{options['num_warps']:5} {registers:9} "
                f"{compiled.metadata.shared:7} {spilled:7}"
            )
    if failed:
        print(f"{failed} kernels keep registers in memory")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

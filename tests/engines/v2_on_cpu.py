"""vLLM's Model Runner V2 on a CPU: import this before vLLM.

Its CPU worker has a path for V2 that wants a Triton with a backend for CPUs, which no package has.
So Triton gets one in name only, and interprets its kernels.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import torch
import triton.backends
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class CpuDriver:
    """What Triton and vLLM ask of a driver where nothing is compiled."""

    @staticmethod
    def is_active():
        return True

    def get_current_device(self):
        return 0

    def get_current_target(self):
        return GPUTarget("cpu", 0, 0)

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu

    def get_benchmarker(self):
        return None


triton.backends.backends["cpu"] = SimpleNamespace(driver=CpuDriver, compiler=None)
driver.set_active(CpuDriver())


def leave_top_k_to_pytorch() -> None:
    """Do without a kernel of vLLM that Triton's interpreter cannot run."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False


def use_few_lanes(grown: int = 7) -> None:
    """Let our kernels have as many lanes as nodes, and few of these: each takes time here.

    Args:
        grown: nodes of a draft, if no more are verified.
    """
    from token_recycling.drafting.kernels.device import learn, propose, requests
    from token_recycling.integrations.vllm import speculator

    for module in (propose, learn, requests):
        module.LEAST_NODES = 2
    speculator.CHAIN_FROM = grown


def attend_as_on_a_gpu(interpreted: str) -> None:
    """Let vLLM attend by its Triton backend: what it has for CPUs knows no trees.

    Args:
        interpreted: whose attention is computed by its kernels: "all", "ours" or "none". PyTorch
            does what the others do, in a fraction of the time.
    """
    import v2_on_cpu_attention
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    register_backend(AttentionBackendEnum.CPU_ATTN, "v2_on_cpu_attention.TritonForCpu")
    if interpreted != "all":
        triton_attn.unified_attention = v2_on_cpu_attention.attend_quickly
    if interpreted == "none":
        from token_recycling.integrations.vllm import device_trees

        device_trees.attend_pages = v2_on_cpu_attention.attend_pages_quickly

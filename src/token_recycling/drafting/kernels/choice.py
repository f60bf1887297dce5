"""Whether a device can run the Triton kernels."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

import torch


@lru_cache
def _installed() -> bool:
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Return whether Triton interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_device_kernels(device: torch.device) -> bool:
    """Return True on CUDA and ROCm with Triton; with its interpreter also on the CPU."""
    return (device.type == "cuda" or (interpreted() and device.type == "cpu")) and _installed()

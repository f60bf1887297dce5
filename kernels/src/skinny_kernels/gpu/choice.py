"""Whether a device can run the Triton kernels."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from importlib.util import find_spec

import torch

LEAST_TRITON = (3, 3)  # takes tuples of arguments; PyTorch 2.7 brings it


@lru_cache
def _installed() -> bool:
    if find_spec("triton") is None:
        return False
    import triton

    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:2])) >= LEAST_TRITON


def interpreted() -> bool:
    """Return whether Triton interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_device_kernels(device: torch.device) -> bool:
    """Return True on CUDA and ROCm with Triton 3.3 or newer; with its interpreter on a CPU too."""
    return (device.type == "cuda" or (interpreted() and device.type == "cpu")) and _installed()

"""Which tensors the kernels for GPUs take."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from skinny_kernels.gpu.choice import has_device_kernels

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def is_ours(tensor: Tensor) -> bool:
    """Return whether the kernels take such a tensor; not quantised ones, which are subclasses."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype in DTYPES
        and has_device_kernels(tensor.device)
    )


def is_used(*tensors: Tensor | None) -> bool:
    """Return whether the kernels compute with these tensors now."""
    first = tensors[0]
    return (
        first is not None
        and all(
            tensor is not None and is_ours(tensor) and tensor.dtype == first.dtype
            for tensor in tensors
        )
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled(first.device.type)
        and first.numel() > 0
    )

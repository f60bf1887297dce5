"""Linear layers for few rows on a CPU.

PyTorch's kernels are made for one row or for hundreds. ``linear_kernel`` is made for 1 to 128, so
that verifying a tree of 16 tokens costs about as much as decoding one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from token_recycling.model.cpu import amx_tile, elementwise, linear_kernel
from token_recycling.model.cpu.threads import Kernel, empty, launch, unwatched
from token_recycling.model.cpu.vectors import FORMS, processor

MOST_ROWS = 128
Layer = tuple[Tensor, "Tensor | None"]  # weight and bias


@lru_cache
def _kernel(dtype: torch.dtype, amx: bool) -> Kernel:
    """Return the kernel for a dtype of weights, compiled at the first call."""
    return Kernel(linear_kernel.compile_kernel(FORMS[dtype], int(amx)), linear_kernel.TAKEN, 1)


def _uses_amx(layers: Sequence[Layer]) -> bool:
    """Return whether tiles of AMX multiply these layers."""
    return processor().tiles and all(
        weight.dtype == torch.bfloat16
        and weight.shape[0] % amx_tile.SIDE == 0
        and weight.shape[1] % amx_tile.STEP == 0
        for weight, _ in layers
    )


def _prepared(inputs: Tensor, amx: bool) -> Tensor:
    """Return inputs as the kernel for weights of their dtype reads them."""
    x = inputs.contiguous()
    if amx:
        return elementwise.interleaved(x)
    reads_own = processor().dots(FORMS[x.dtype])
    return elementwise.converted(x, x.dtype if reads_own else torch.float32)


@lru_cache
def _fields(layers: int) -> Any:
    return ctypes.c_int64 * linear_kernel.fields_of(layers)


@unwatched
def products(inputs: Tensor, layers: Sequence[Layer], *, gated: bool = False) -> list[Tensor]:
    """Compute ``torch.nn.functional.linear`` of the same inputs for several layers.

    Args:
        inputs: [..., in_features] of the weights' dtype, not empty.
        layers: weights [out_features, in_features] on the CPU, of a dtype in ``FORMS``, whose rows
            are contiguous; biases [out_features], contiguous, or None.
        gated: replace the first of two outputs by silu(first) * second.

    Returns:
        [..., out_features] each; sums are accumulated in float32.
    """
    dtype, size = inputs.dtype, inputs.shape[-1]
    amx = _uses_amx(layers)
    x, shape = _prepared(inputs, amx), inputs.shape[:-1]
    rows, threads = inputs.numel() // size, torch.get_num_threads()
    numbers = [x.data_ptr(), size * x.itemsize, rows, size, len(layers), gated, threads, 0]
    outputs = []
    for weight, bias in layers:
        height = weight.shape[0]
        output = empty((*shape, height), dtype)
        outputs.append(output)
        numbers += (
            weight.data_ptr(),
            weight.stride(0) * weight.itemsize,
            output.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            height,
        )
    launch(_kernel(dtype, amx), _fields(len(layers))(*numbers), threads, layers)
    return outputs


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` with the kernel (see ``products``)."""
    return products(inputs, [(weight, bias)])[0]


@torch.library.custom_op("token_recycling::linear", mutates_args=())
def _opaque_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For compiled steps, which cannot look into the kernel."""
    return product(inputs, weight, bias)


@_opaque_product.register_fake
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])

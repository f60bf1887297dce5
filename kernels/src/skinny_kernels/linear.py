"""Linear layers for few rows on a CPU.

PyTorch's kernels are made for one row or for hundreds. ``linear_kernel`` is made for few, so that
verifying a tree of 16 tokens costs about as much as decoding one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skinny_kernels import activations, amx_tile, elementwise, linear_kernel
from skinny_kernels.block_formats import FORMATS
from skinny_kernels.launch import empty, launch, unwatched
from skinny_kernels.machine_code import Kernel
from skinny_kernels.vectors import FORMS as FORMS
from skinny_kernels.vectors import processor

FEW_TOKENS = 128  # of a row of a batch for which layers are multiplied by the kernel


class Layer(NamedTuple):
    """A linear layer.

    Attributes:
        weight: [out_features, in_features] on the CPU, of a dtype in ``FORMS``, whose rows are
            contiguous; or contiguous uint8 [rows, bytes], interleaved blocks of ``ggml_type`` (see
            ``block_formats``).
        bias: [out_features], contiguous, or None.
        ggml_type: ggml's number of a block format; None for a dense weight.
        block_rows: out_features of a weight in blocks, whose rows are filled up.
    """

    weight: Tensor
    bias: Tensor | None = None
    ggml_type: int | None = None
    block_rows: int | None = None

    @property
    def outputs(self) -> int:
        """out_features."""
        return self.weight.shape[0] if self.block_rows is None else self.block_rows

    @property
    def inputs(self) -> int:
        """in_features."""
        size: int = self.weight.shape[1]
        if self.ggml_type is None:
            return size
        form = FORMATS[self.ggml_type]
        return size // form.size * form.numbers

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row of the weight."""
        return self.weight.stride(0) * self.weight.itemsize


@lru_cache
def _kernel(form: int) -> Kernel:
    """Return the kernel for a form of weights, compiled at the first call."""
    return Kernel(linear_kernel.multiply, form, in_pieces=True)


def _form(layer: Layer) -> int:
    """Return how the kernel reads the weights of a layer (see ``linear_kernel.multiply``)."""
    weight = layer.weight
    if layer.ggml_type is not None:
        return linear_kernel.BLOCKS + layer.ggml_type
    outputs, inputs = weight.shape
    fills_tiles = outputs % amx_tile.SIDE == 0 and inputs % amx_tile.STEP == 0
    if processor().tiles and weight.dtype == torch.bfloat16 and fills_tiles:
        return linear_kernel.AMX
    return FORMS[weight.dtype]


def _prepared(inputs: Tensor, form: int) -> tuple[Tensor, int]:
    """Return inputs as the kernel reads them, and the bytes of a row, or from record to record."""
    x = inputs.contiguous()
    if form >= linear_kernel.BLOCKS:
        records = elementwise.rounded(x)
        return records, records.stride(0)
    size = x.shape[-1]
    if form == linear_kernel.AMX:
        return elementwise.interleaved(x), size * x.itemsize
    x = elementwise.converted(x, x.dtype if processor().dots(form) else torch.float32)
    return x, size * x.itemsize


@lru_cache
def _fields(layers: int) -> Any:
    return ctypes.c_int64 * linear_kernel.fields_of(layers)


@unwatched
def products(
    inputs: Tensor, layers: Sequence[Layer], *, gated: int = activations.NOT_GATED
) -> list[Tensor]:
    """Compute ``torch.nn.functional.linear`` of the same inputs for several layers.

    Args:
        inputs: [..., in_features] of the weights' dtype, float32 for blocks; not empty.
        layers: the layers; in one launch if their weights are of one kind.
        gated: an activation (``activations.SILU`` and so on): the first of two outputs becomes
            activation(first) * second; the layers are of one kind.

    Returns:
        [..., out_features] each; sums are accumulated in float32.
    """
    # By each layer alone, so that its bits do not depend on the others.
    form, *others = {_form(layer) for layer in layers}
    if others:
        assert not gated
        return [products(inputs, [layer])[0] for layer in layers]
    x, stride = _prepared(inputs, form)
    dtype, size, shape = inputs.dtype, inputs.shape[-1], inputs.shape[:-1]
    rows, threads = inputs.numel() // size, torch.get_num_threads()
    heights, w_stride = [layer.outputs for layer in layers], layers[0].row_bytes
    *division, pieces = linear_kernel.shares(form, rows, w_stride, heights, threads, gated)
    numbers = [x.data_ptr(), stride, rows, size, len(layers), gated, *division]
    outputs = []
    for layer, height in zip(layers, heights):
        output = empty((*shape, height), dtype)
        outputs.append(output)
        numbers += (
            layer.weight.data_ptr(),
            layer.row_bytes,
            output.data_ptr(),
            0 if layer.bias is None else layer.bias.data_ptr(),
            height,
        )
    launch(_kernel(form), _fields(len(layers))(*numbers), pieces, threads, layers)
    return outputs


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` with the kernel (see ``products``)."""
    return products(inputs, [Layer(weight, bias)])[0]

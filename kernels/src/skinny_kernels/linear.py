"""Linear layers for few rows on a CPU.

PyTorch's kernels are made for one row or for hundreds. ``linear_kernel`` is made for few, so that
16 rows cost about as much as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from skinny_kernels import activations, amx_tile, elementwise
from skinny_kernels import linear_kernel as kernels
from skinny_kernels.block_formats import FORMATS
from skinny_kernels.launch import empty, fields_of, launch, unwatched
from skinny_kernels.machine_code import Kernel
from skinny_kernels.vectors import DTYPES as DTYPES
from skinny_kernels.vectors import processor

FEW_TOKENS = 128  # of a row of a batch for which layers are multiplied by the kernel


class Layer(NamedTuple):
    """A linear layer.

    Attributes:
        weight: [out_features, in_features] on the CPU, of a dtype in ``DTYPES``, whose rows are
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
        format = FORMATS[self.ggml_type]
        return size // format.size * format.numbers

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row of the weight."""
        return self.weight.stride(0) * self.weight.itemsize


@lru_cache
def _kernel(way: int) -> Kernel:
    """Return the kernel that multiplies weights in this way, compiled at the first call."""
    return Kernel(kernels.multiply, way, in_pieces=True)


def _way(layer: Layer) -> int:
    """Return how the kernel reads the weights of a layer (see ``linear_kernel.multiply``)."""
    weight = layer.weight
    if layer.ggml_type is not None:
        return kernels.BLOCKS + layer.ggml_type
    outputs, inputs = weight.shape
    fills_tiles = outputs % amx_tile.SIDE == 0 and inputs % amx_tile.STEP == 0
    if processor().tiles and weight.dtype == torch.bfloat16 and fills_tiles:
        return kernels.AMX
    return DTYPES[weight.dtype]


def _arranged(inputs: Tensor, way: int) -> tuple[Tensor, int]:
    """Return inputs as the kernel reads them, and the bytes of a row, or from record to record."""
    x = inputs.contiguous()
    if way >= kernels.BLOCKS:
        records = elementwise.rounded(x)
        return records, records.stride(0)
    size = x.shape[-1]
    if way == kernels.AMX:
        return elementwise.interleaved(x), size * x.itemsize
    x = elementwise.converted(x, x.dtype if processor().dots(way) else torch.float32)
    return x, size * x.itemsize


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
    way, *others = {_way(layer) for layer in layers}
    if others:
        assert not gated
        return [products(inputs, [layer])[0] for layer in layers]
    x, stride = _arranged(inputs, way)
    rows, threads = inputs.numel() // inputs.shape[-1], torch.get_num_threads()
    heights, w_stride = [layer.outputs for layer in layers], layers[0].row_bytes
    division = kernels.shares(way, rows, w_stride, heights, threads, gated)
    words = {
        kernels.X: x.data_ptr(),
        kernels.X_STRIDE: stride,
        kernels.ROWS: rows,
        kernels.INPUTS: inputs.shape[-1],
        kernels.LAYERS: len(layers),
        kernels.GATED: gated,
        kernels.HEIGHT: division.height,
        kernels.STRIP_ROWS: division.strip,
        kernels.SHARE: division.share,
    }
    outputs = [empty((*inputs.shape[:-1], height), inputs.dtype) for height in heights]
    for n, (layer, output) in enumerate(zip(layers, outputs)):
        begin = kernels.COMMON_FIELDS + kernels.LAYER_FIELDS * n
        words[begin + kernels.W] = layer.weight.data_ptr()
        words[begin + kernels.W_STRIDE] = layer.row_bytes
        words[begin + kernels.Y] = output.data_ptr()
        words[begin + kernels.BIAS] = 0 if layer.bias is None else layer.bias.data_ptr()
        words[begin + kernels.OUTPUTS] = layer.outputs
    launch(_kernel(way), fields_of(words), division.pieces, threads, layers)
    return outputs


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` with the kernel (see ``products``)."""
    return products(inputs, [Layer(weight, bias)])[0]

"""Layers whose weights stay in the block formats of GGUF files, on a CPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as dense

from token_recycling.model.cpu import dequantise_kernel, linear
from token_recycling.model.cpu.block_formats import FORMATS
from token_recycling.model.cpu.launch import launch, unwatched
from token_recycling.model.cpu.machine_code import Kernel
from token_recycling.model.cpu.team import is_available
from token_recycling.model.cpu.vectors import processor

STRIP = 2**22  # numbers of a weight that are dequantised at a time for many rows


def can_compute(ggml_type: int) -> bool:
    """Return whether there are kernels for a block format on this processor."""
    return ggml_type in FORMATS and processor().dot_bytes and is_available()


def bytes_of(ggml_type: int, numbers: int) -> int:
    """Return the bytes of this many consecutive numbers of a row."""
    form = FORMATS[ggml_type]
    return numbers // form.numbers * form.size


@lru_cache
def _kernel(ggml_type: int) -> Kernel:
    return Kernel(dequantise_kernel.dequantise, ggml_type, in_pieces=True)


@unwatched
def dequantised(blocks: Tensor, ggml_type: int, size: int, out: Tensor | None = None) -> Tensor:
    """Return the numbers of rows of blocks.

    Args:
        blocks: uint8 [rows, bytes] on the CPU; the bytes of a row are contiguous.
        ggml_type: ggml's number of the format.
        size: numbers in a row.
        out: where to write them, contiguous float32 [rows or more, size].

    Returns:
        float32 [rows, size].
    """
    rows = blocks.shape[0]
    if out is None:
        out = torch.empty((rows, size), dtype=torch.float32, device="cpu")
    threads = torch.get_num_threads()
    numbers = (blocks.data_ptr(), blocks.stride(0), out.data_ptr(), rows, size)
    fields = (ctypes.c_int64 * len(numbers))(*numbers)
    launch(_kernel(ggml_type), fields, -(-rows // dequantise_kernel.SHARE), threads, blocks)
    return out[:rows]


class PackedLinear(nn.Module):
    """``nn.Linear`` whose weight stays packed.

    Attributes:
        weight: uint8 [out_features, bytes].
        bias: float32 [out_features], or None.
        ggml_type: ggml's number of the block format.
    """

    def __init__(
        self, in_features: int, weight: Tensor, ggml_type: int, bias: Tensor | None = None
    ) -> None:
        """Take a weight as it is."""
        super().__init__()
        self.in_features, self.out_features = in_features, weight.shape[0]
        self.ggml_type = ggml_type
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def layer(self) -> linear.Layer:
        """Return what the kernel reads."""
        return linear.Layer(self.weight, self.bias, self.ggml_type)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply inputs [..., in_features]; returns [..., out_features] of their dtype."""
        x = inputs.float().contiguous()
        rows = x.numel() // self.in_features
        if not rows:
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        if rows <= linear.MOST_TOKENS:
            return linear.products(x, [self.layer()])[0].to(inputs.dtype)
        output = x.new_empty(*x.shape[:-1], self.out_features)
        height = max(1, STRIP // self.in_features)
        strip = x.new_empty(min(height, self.out_features), self.in_features)
        for first in range(0, self.out_features, height):
            blocks = self.weight[first : first + height]
            rows_of_w = dequantised(blocks, self.ggml_type, self.in_features, strip)
            bias = None if self.bias is None else self.bias[first : first + height]
            output[..., first : first + height] = dense(x, rows_of_w, bias)
        return output.to(inputs.dtype)

    def extra_repr(self) -> str:
        """Describe the layer."""
        name = FORMATS[self.ggml_type].name
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {name}"


class PackedEmbedding(nn.Module):
    """``nn.Embedding`` whose table stays packed.

    Attributes:
        weight: uint8 [num_embeddings, bytes].
        ggml_type: ggml's number of the block format.
        scale: multiplies what is looked up.
    """

    def __init__(
        self, embedding_dim: int, weight: Tensor, ggml_type: int, scale: float = 1.0
    ) -> None:
        """Take a table as it is."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape[0], embedding_dim
        self.ggml_type, self.scale = ggml_type, scale
        self.weight = nn.Parameter(weight, requires_grad=False)

    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return float32 [..., embedding_dim] of ids [...]."""
        blocks = self.weight[ids.reshape(-1)]
        embeddings = dequantised(blocks, self.ggml_type, self.embedding_dim)
        if self.scale != 1.0:
            embeddings *= self.scale
        return embeddings.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {FORMATS[self.ggml_type].name}"

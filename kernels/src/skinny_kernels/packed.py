"""Layers whose weights stay in the block formats of GGUF files, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from skinny_kernels import block_layout as kernels
from skinny_kernels import elementwise, linear
from skinny_kernels.block_formats import FORMATS as FORMATS
from skinny_kernels.block_formats import ROWS
from skinny_kernels.launch import empty, fields_of, launch, unwatched
from skinny_kernels.machine_code import Kernel
from skinny_kernels.team import is_available
from skinny_kernels.vectors import processor

new_bytes = partial(torch.empty, dtype=torch.uint8, device="cpu")


def can_compute(ggml_type: int) -> bool:
    """Return whether there are kernels for a block format on this processor."""
    return ggml_type in FORMATS and processor().dot_bytes and is_available()


@lru_cache
def _kernel(function: Any, ggml_type: int) -> Kernel:
    return Kernel(function, ggml_type, in_pieces=True)


def filled_up(rows: int) -> int:
    """Return the rows of a weight whose blocks are interleaved."""
    return -(-rows // ROWS) * ROWS


@unwatched
def interleaved(
    blocks: Tensor,
    ggml_type: int,
    order: Tensor | None = None,
    new: Callable[..., Tensor] = new_bytes,
) -> Tensor:
    """Return blocks of a file in the order in which the kernels read them (see ``block_formats``).

    Args:
        blocks: uint8 [rows, bytes] on the CPU; the bytes of a row are contiguous.
        ggml_type: ggml's number of the format.
        order: int64 [rows], numbers of the rows in the order of the result; None: as they are.
        new: called with a shape, returns memory of bytes for the result.

    Returns:
        uint8 [rows that are filled up, bytes].
    """
    rows, row_bytes = blocks.shape
    order = torch.arange(rows) if order is None else order.contiguous()
    out = new((filled_up(rows), row_bytes))
    fields = fields_of(
        {
            kernels.FROM: blocks.data_ptr(),
            kernels.FROM_STRIDE: blocks.stride(0),
            kernels.ORDER: order.data_ptr(),
            kernels.COUNT: rows,
            kernels.TO: out.data_ptr(),
            kernels.BLOCKS: row_bytes // FORMATS[ggml_type].size,
        }
    )
    pieces, threads = filled_up(rows) // ROWS, torch.get_num_threads()
    launch(_kernel(kernels.interleave, ggml_type), fields, pieces, threads, (blocks, order))
    return out


@unwatched
def read_rows(weight: Tensor, ggml_type: int, ids: Tensor) -> Tensor:
    """Return the numbers of rows of a weight.

    Args:
        weight: as ``interleaved`` returns it.
        ggml_type: ggml's number of the format.
        ids: int64 [n], numbers of the rows.

    Returns:
        float32 [n, numbers of a row].
    """
    format, ids = FORMATS[ggml_type], ids.contiguous()
    blocks = weight.shape[1] // format.size
    out = empty((len(ids), blocks * format.numbers), torch.float32)
    fields = fields_of(
        {
            kernels.TABLE: weight.data_ptr(),
            kernels.IDS: ids.data_ptr(),
            kernels.NUMBERS: out.data_ptr(),
            kernels.TABLE_BLOCKS: blocks,
        }
    )
    kernel = _kernel(kernels.read_row, ggml_type)
    launch(kernel, fields, len(ids), torch.get_num_threads(), (weight, ids))
    return out


class PackedLinear(nn.Module):
    """``nn.Linear`` whose weight stays packed.

    Attributes:
        weight: uint8 [rows, bytes], interleaved blocks (see ``interleaved``).
        bias: float32 [out_features], or None.
        ggml_type: ggml's number of the block format.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight: Tensor,
        ggml_type: int,
        bias: Tensor | None = None,
    ) -> None:
        """Take a weight as it is."""
        super().__init__()
        self.in_features, self.out_features, self.ggml_type = in_features, out_features, ggml_type
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def layer(self) -> linear.Layer:
        """Return what the kernel reads."""
        return linear.Layer(self.weight, self.bias, self.ggml_type, self.out_features)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply inputs [..., in_features]; returns [..., out_features] of their dtype."""
        if not inputs.numel():
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        return linear.products(inputs.float(), [self.layer()])[0].to(inputs.dtype)

    def extra_repr(self) -> str:
        """Describe the layer."""
        name = FORMATS[self.ggml_type].name
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {name}"


class PackedEmbedding(nn.Module):
    """``nn.Embedding`` whose table stays packed.

    Attributes:
        weight: uint8 [rows, bytes], interleaved blocks (see ``interleaved``).
        ggml_type: ggml's number of the block format.
        scale: multiplies what is looked up.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight: Tensor,
        ggml_type: int,
        scale: float = 1.0,
    ) -> None:
        """Take a table as it is."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.ggml_type, self.scale = ggml_type, scale
        self.weight = nn.Parameter(weight, requires_grad=False)

    @unwatched
    @torch.no_grad()
    def forward(self, ids: Tensor) -> Tensor:
        """Return float32 [..., embedding_dim] of ids [...].

        Raises:
            IndexError: an id is not one of the table's.
        """
        flat = ids.reshape(-1).long()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_embeddings:
            raise IndexError("index out of range in self")
        embeddings = read_rows(self.weight, self.ggml_type, flat)
        if self.scale != 1.0:
            embeddings = elementwise.multiply(embeddings, self.scale)
        return embeddings.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        """Describe the layer."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {FORMATS[self.ggml_type].name}"

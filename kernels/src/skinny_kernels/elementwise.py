"""What a layer computes beside matrix products, of few tokens on a CPU: a launch each."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from skinny_kernels import block_inputs, norm_kernel
from skinny_kernels import elementwise_kernel as kernels
from skinny_kernels.amx_tile import SIDE
from skinny_kernels.launch import empty, fields_of, launch, this_thread, unwatched
from skinny_kernels.machine_code import Kernel
from skinny_kernels.vectors import DTYPES, FLOAT32

PIECE = 2**13  # numbers that a thread normalises or activates at a time
IN_PIECES = "norm", "apply"
Constants = ctypes.c_float * 2


@lru_cache
def _kernel(name: str, dtype: torch.dtype) -> Kernel:
    """Return a kernel, compiled at the first call."""
    module = norm_kernel if name == "norm" else kernels
    return Kernel(getattr(module, name), DTYPES[dtype], in_pieces=name in IN_PIECES)


@unwatched
def rms_norm(x: Tensor, weight: Tensor, epsilon: float, added: float = 0.0) -> Tensor:
    """Compute ``x / sqrt(mean(x^2) + epsilon) * (weight + added)``.

    Args:
        x: [..., size] of at most four dimensions and a dtype in ``DTYPES``; the numbers of a row
            are contiguous.
        weight: contiguous [size], of the same dtype.
        epsilon: added to the mean square.
        added: 1 where a model stores its weights minus 1, as Gemma does.

    Returns:
        Contiguous, of the shape and dtype of ``x``. With ``added`` 0, it is rounded before it is
        multiplied by the weights.
    """
    return _norm(x, weight, None, Constants(epsilon, added))


@unwatched
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Compute ``(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias`` (see ``rms_norm``).

    ``bias``: like ``weight``.
    """
    return _norm(x, weight, bias, Constants(epsilon))


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Any) -> Tensor:
    size, out = x.shape[-1], empty(x.shape, x.dtype)
    rows = x.numel() // size
    share = max(1, PIECE // size)
    x = x[(None,) * (4 - x.dim())]
    by_batch, by_head, by_token = _strides(x)
    fields = fields_of(
        {
            norm_kernel.INPUT: x.data_ptr(),
            norm_kernel.OUTPUT: out.data_ptr(),
            norm_kernel.WEIGHT: weight.data_ptr(),
            norm_kernel.BIAS: 0 if bias is None else bias.data_ptr(),
            norm_kernel.EPSILON: ctypes.addressof(numbers),
            norm_kernel.ROWS: rows,
            norm_kernel.SIZE: size,
            norm_kernel.HEADS: x.shape[1],
            norm_kernel.TOKENS: x.shape[2],
            norm_kernel.BATCH_STEP: by_batch,
            norm_kernel.HEAD_STEP: by_head,
            norm_kernel.TOKEN_STEP: by_token,
            norm_kernel.SHARE: share,
        }
    )
    pieces, threads = -(-rows // share), torch.get_num_threads()
    launch(_kernel("norm", x.dtype), fields, pieces, threads, (weight, bias, numbers))
    return out


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides in bytes of batch, heads and tokens."""
    by_batch, by_head, by_token, _ = x.stride()
    size = x.itemsize
    return by_batch * size, by_head * size, by_token * size


@unwatched
def rotary(inputs: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Rotate the halves of every head by angles of its token (Su et al., arXiv 2104.09864).

    Args:
        inputs: [B, heads, n, size] each, of a dtype in ``DTYPES``; a head's numbers are contiguous.
        cos: [B, n, size] of the same dtype or float32; a token's numbers are contiguous.
        sin: likewise.

    Returns:
        Contiguous tensors of the same shapes.
    """
    outputs = tuple(empty(x.shape, x.dtype) for x in inputs)
    width = cos.itemsize
    angles = {
        kernels.COS: cos.data_ptr(),
        kernels.SIN: sin.data_ptr(),
        kernels.COS_BATCH: width * cos.stride(0),
        kernels.COS_TOKEN: width * cos.stride(1),
        kernels.SIN_BATCH: width * sin.stride(0),
        kernels.SIN_TOKEN: width * sin.stride(1),
        kernels.WIDE_ANGLES: int(cos.dtype != inputs[0].dtype),
    }
    _rotate(inputs, outputs, angles)
    return outputs


@unwatched
def joined(inputs: Any) -> Tensor:
    """Return [B, heads, n, size], the numbers of heads of several tensors behind each other.

    Args:
        inputs: [B, heads, n, some numbers] each, of a dtype in ``DTYPES``; a head's numbers are
            contiguous.
    """
    sizes = [x.shape[3] for x in inputs]
    out = empty((*inputs[0].shape[:3], sum(sizes)), inputs[0].dtype)
    for x, part in zip(inputs, torch.split(out, sizes, dim=3)):
        copy_heads((x,), (part,))
    return out


@unwatched
def copy_heads(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Any:
    """Copy each of ``inputs`` [B, heads, n, size] to one of ``outputs``; return the fields."""
    return _rotate(inputs, outputs, dict.fromkeys(range(kernels.BATCH), 0))


def store(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], layer: Any) -> None:
    """Copy each of ``inputs`` to one of ``outputs``: keys and values to their slots in a cache.

    Args:
        inputs: [B, heads, n, size] each.
        outputs: views of the slots.
        layer: of the cache; at a replay of a recorded step, they are slots of that layer.
    """
    if this_thread.recorder is None:
        for states, entries in zip(inputs, outputs):
            entries.copy_(states)
    else:
        this_thread.recorder.rebind_copy(copy_heads(inputs, outputs), layer)


def output_at(n: int) -> int:
    """Return the position of the address of output ``n`` among the fields of ``copy_heads``."""
    return kernels.ROTARY_FIELDS + kernels.TENSOR_FIELDS * n + kernels.TO


def output_strides(n: int, out: Tensor) -> Iterable[tuple[int, int]]:
    """Return the fields of the strides of another output ``n``, as positions and words."""
    return enumerate(_strides(out), output_at(n) - kernels.TO + kernels.TO_BATCH)


def _rotate(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], angles: dict[int, int]) -> Any:
    words = {
        **angles,
        kernels.BATCH: inputs[0].shape[0],
        kernels.TOKENS: inputs[0].shape[2],
        kernels.HEAD_SIZE: inputs[0].shape[3],
        kernels.TENSORS: len(inputs),
    }
    for n, (x, out) in enumerate(zip(inputs, outputs)):
        begin = kernels.ROTARY_FIELDS + kernels.TENSOR_FIELDS * n
        words[begin + kernels.FROM] = x.data_ptr()
        words[begin + kernels.TO] = out.data_ptr()
        words[begin + kernels.HEADS] = x.shape[1]
        words.update(enumerate(_strides(x), begin + kernels.FROM_BATCH))
        words.update(output_strides(n, out))
    fields = fields_of(words)
    launch(_kernel("rotary", inputs[0].dtype), fields, 1)
    return fields


@unwatched
def add(first: Tensor, second: Tensor) -> Tensor:
    """Add two contiguous tensors of the same shape and dtype."""
    out = empty(first.shape, first.dtype)
    fields = fields_of(
        {
            kernels.FIRST: first.data_ptr(),
            kernels.SECOND: second.data_ptr(),
            kernels.RESULT: out.data_ptr(),
            kernels.COUNT: out.numel(),
        }
    )
    launch(_kernel("add", first.dtype), fields, 1)
    return out


def multiply(x: Tensor, factor: float | Tensor) -> Tensor:
    """Multiply a contiguous tensor by a number, which is rounded to float32, or by one in memory.

    ``factor``: if it is a tensor, of one number and a dtype in ``DTYPES``.
    """
    return _with_number(kernels.PRODUCT, x, factor)


def divide(x: Tensor, divisor: float | Tensor) -> Tensor:
    """Divide a contiguous tensor by a number (see ``multiply``)."""
    return _with_number(kernels.QUOTIENT, x, divisor)


@unwatched
def _with_number(function: int, x: Tensor, number: float | Tensor) -> Tensor:
    held: Any
    if isinstance(number, Tensor):
        held = converted(number, torch.float32)
        address = held.data_ptr()
    else:
        held = ctypes.c_float(number)
        address = ctypes.addressof(held)
    return _apply(function, x, address, held)


def _apply(function: int, x: Tensor, address: int, held: Any) -> Tensor:
    """Compute a function of all numbers of a contiguous tensor and of the one at ``address``."""
    out = empty(x.shape, x.dtype)
    fields = fields_of(
        {
            kernels.FIRST: x.data_ptr(),
            kernels.SECOND: address,
            kernels.RESULT: out.data_ptr(),
            kernels.COUNT: x.numel(),
            kernels.SHARE: PIECE,
            kernels.FUNCTION: function,
        }
    )
    pieces, threads = -(-x.numel() // PIECE), torch.get_num_threads()
    launch(_kernel("apply", x.dtype), fields, pieces, threads, held)
    return out


@unwatched
def activate(x: Tensor, activation: int, limit: float = 0.0) -> Tensor:
    """Compute an activation (``activations.SILU`` and so on) of all numbers of a contiguous tensor.

    ``limit``: of ``CAP``.
    """
    number = ctypes.c_float(limit)
    return _apply(activation, x, ctypes.addressof(number), number)


@unwatched
def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Return rows of a table.

    Args:
        ids: contiguous int64 [...], each the number of a row.
        table: [rows, size] of a dtype in ``DTYPES``; the numbers of a row are contiguous.

    Returns:
        Contiguous [..., size].
    """
    out = empty((*ids.shape, table.shape[1]), table.dtype)
    fields = fields_of(
        {
            kernels.TABLE: table.data_ptr(),
            kernels.TABLE_ROW: table.stride(0) * table.itemsize,
            kernels.ROW_SIZE: table.shape[1],
            kernels.IDS: ids.data_ptr(),
            kernels.IDS_COUNT: ids.numel(),
            kernels.EMBEDDED: out.data_ptr(),
        }
    )
    launch(_kernel("embed", table.dtype), fields, 1, held=table)
    return out


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor in its own dtype or in float32."""
    if x.dtype == dtype:
        return x
    out = empty(x.shape, dtype)
    fields = fields_of(
        {
            kernels.CONVERTED_FROM: x.data_ptr(),
            kernels.CONVERTED_TO: out.data_ptr(),
            kernels.CONVERTED_COUNT: x.numel(),
        }
    )
    launch(_kernel("widen", x.dtype), fields, 1)
    return out


def interleaved(x: Tensor) -> Tensor:
    """Return contiguous bfloat16 inputs [..., size] as tiles of AMX read them; 32 divides ``size``.

    Returns:
        For every 16 rows: [size / 2, 16, 2], pairs of numbers of one row beside those of the
        others, where the last of all rows is repeated; fewer than 16 rows: [size / 2, rows, 2].
    """
    size = x.shape[-1]
    rows = x.numel() // size
    groups = -(-rows // SIDE)
    # The last store of a group is a whole vector.
    out = empty((groups * min(rows, SIDE) * size + 2 * SIDE,), x.dtype)
    fields = fields_of(
        {
            kernels.ROWS_FROM: x.data_ptr(),
            kernels.INTERLEAVED: out.data_ptr(),
            kernels.INTERLEAVED_ROWS: rows,
            kernels.PAIRS: size // 2,
        }
    )
    launch(_kernel("interleave", x.dtype), fields, 1)
    return out


def rounded(x: Tensor) -> Tensor:
    """Round inputs to whole numbers, as the tiles for a block format read them.

    Args:
        x: contiguous float32 [..., size]; 32 divides ``size``.

    Returns:
        uint8 [size / 32, rows, bytes of a record] (see ``block_inputs``).
    """
    groups = x.shape[-1] // block_inputs.GROUP
    rows = x.numel() // x.shape[-1]
    out = empty((groups, rows, block_inputs.RECORD), torch.uint8)
    fields = fields_of(
        {
            block_inputs.FROM: x.data_ptr(),
            block_inputs.TO: out.data_ptr(),
            block_inputs.TOKENS: rows,
            block_inputs.GROUPS: groups,
        }
    )
    pieces, threads = -(-rows * groups // block_inputs.SHARE), torch.get_num_threads()
    launch(_rounding(), fields, pieces, threads)
    return out


@lru_cache
def _rounding() -> Kernel:
    return Kernel(block_inputs.round_records, FLOAT32, in_pieces=True)


@unwatched
def packed_queries(query: Tensor, key_heads: int, width: int) -> Tensor:
    """Return queries [B, heads, n, size] as ``attention`` reads them.

    Returns:
        float32 [B, key heads, size, width]: the queries of the heads of a group, then zeros.
    """
    batch, heads, tokens, size = query.shape
    out = empty((batch, key_heads, size, width), torch.float32)
    by_batch, by_head, by_token = _strides(query)
    fields = fields_of(
        {
            kernels.QUERY: query.data_ptr(),
            kernels.PACKED: out.data_ptr(),
            kernels.Q_BATCH: by_batch,
            kernels.Q_HEAD: by_head,
            kernels.Q_TOKEN: by_token,
            kernels.Q_BATCHES: batch,
            kernels.KEY_HEADS: key_heads,
            kernels.GROUP: heads // key_heads,
            kernels.Q_TOKENS: tokens,
            kernels.Q_SIZE: size,
            kernels.WIDTH: width,
        }
    )
    launch(_kernel("pack", query.dtype), fields, 1)
    return out

"""What a layer computes beside matrix products, of few tokens on a CPU: a launch each."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from skinny_kernels import block_inputs, norm_kernel
from skinny_kernels import elementwise_kernel as kernels
from skinny_kernels.amx_tile import SIDE
from skinny_kernels.launch import empty, launch, recording, unwatched
from skinny_kernels.machine_code import Kernel
from skinny_kernels.vectors import FLOAT32, FORMS

PIECE = 2**13  # numbers that a thread normalises or activates at a time
IN_PIECES = "norm", "activate", "multiply", "divide"
Constants = ctypes.c_float * 2


@lru_cache
def _kernel(name: str, dtype: torch.dtype) -> Kernel:
    """Return a kernel, compiled at the first call."""
    module = norm_kernel if name == "norm" else kernels
    return Kernel(getattr(module, name), FORMS[dtype], in_pieces=name in IN_PIECES)


@lru_cache
def _fields(count: int) -> Any:
    return ctypes.c_int64 * count


@unwatched
def rms_norm(x: Tensor, weight: Tensor, epsilon: float, added: float = 0.0) -> Tensor:
    """Compute ``x / sqrt(mean(x^2) + epsilon) * (weight + added)``.

    Args:
        x: [..., size] of at most four dimensions and a dtype in ``FORMS``; the numbers of a row are
            contiguous.
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
    fields = _fields(13)(
        x.data_ptr(),
        out.data_ptr(),
        weight.data_ptr(),
        ctypes.addressof(numbers),
        rows,
        size,
        *x.shape[1:3],
        *_strides(x),
        share,
        0 if bias is None else bias.data_ptr(),
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
        inputs: [B, heads, n, size] each, of a dtype in ``FORMS``; a head's numbers are contiguous.
        cos: [B, n, size] of the same dtype or float32; a token's numbers are contiguous.
        sin: likewise.

    Returns:
        Contiguous tensors of the same shapes.
    """
    outputs = tuple(empty(x.shape, x.dtype) for x in inputs)
    width = cos.itemsize
    (c_batch, c_token, _), (s_batch, s_token, _) = cos.stride(), sin.stride()
    angles = (cos.data_ptr(), sin.data_ptr(), c_batch, c_token, s_batch, s_token)
    strides = tuple(width * stride for stride in angles[2:])
    _rotate(inputs, outputs, (*angles[:2], *strides, int(cos.dtype != inputs[0].dtype)))
    return outputs


@unwatched
def joined(inputs: Any) -> Tensor:
    """Return [B, heads, n, size], the numbers of heads of several tensors behind each other.

    Args:
        inputs: [B, heads, n, some numbers] each, of a dtype in ``FORMS``; a head's numbers are
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
    return _rotate(inputs, outputs, (0,) * 7)


def store(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], layer: Any) -> None:
    """Copy each of ``inputs`` to one of ``outputs``: keys and values to their slots in a cache.

    Args:
        inputs: [B, heads, n, size] each.
        outputs: views of the slots.
        layer: of the cache; at a replay of a recorded step, they are slots of that layer.
    """
    if recording.recorder is None:
        for states, entries in zip(inputs, outputs):
            entries.copy_(states)
    else:
        recording.recorder.rebind_copy(copy_heads(inputs, outputs), layer)


def output_at(n: int) -> int:
    """Return the position of the address of output ``n`` among the fields of ``copy_heads``."""
    return kernels.ROTARY_FIELDS + kernels.TENSOR_FIELDS * n + kernels.TO


def output_strides(n: int, out: Tensor) -> list[tuple[int, int]]:
    """Return the fields of the strides of another output ``n``, as positions and words."""
    first = output_at(n) - kernels.TO + kernels.TO_BATCH
    return list(enumerate(_strides(out), first))


def _rotate(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], angles: Any) -> Any:
    batch, _, tokens, size = inputs[0].shape
    numbers = [*angles, batch, tokens, size, len(inputs)]
    for x, out in zip(inputs, outputs):
        numbers += (x.data_ptr(), out.data_ptr(), x.shape[1], *_strides(x), *_strides(out))
    fields = _fields(len(numbers))(*numbers)
    launch(_kernel("rotary", inputs[0].dtype), fields, 1)
    return fields


@unwatched
def add(first: Tensor, second: Tensor) -> Tensor:
    """Add two contiguous tensors of the same shape and dtype."""
    out = empty(first.shape, first.dtype)
    fields = _fields(4)(first.data_ptr(), second.data_ptr(), out.data_ptr(), out.numel())
    launch(_kernel("add", first.dtype), fields, 1)
    return out


def multiply(x: Tensor, factor: float | Tensor) -> Tensor:
    """Multiply a contiguous tensor by a number, which is rounded to float32, or by one in memory.

    ``factor``: if it is a tensor, of one number and a dtype in ``FORMS``.
    """
    return _with_number("multiply", x, factor)


def divide(x: Tensor, divisor: float | Tensor) -> Tensor:
    """Divide a contiguous tensor by a number (see ``multiply``)."""
    return _with_number("divide", x, divisor)


@unwatched
def _with_number(name: str, x: Tensor, number: float | Tensor) -> Tensor:
    held: Any
    if isinstance(number, Tensor):
        held = converted(number, torch.float32)
        address = held.data_ptr()
    else:
        held = ctypes.c_float(number)
        address = ctypes.addressof(held)
    return _each(name, x, address, held)


def _each(name: str, x: Tensor, address: int, held: Any, *others: int) -> Tensor:
    """Launch a kernel for all numbers of a contiguous tensor and the number at ``address``."""
    out = empty(x.shape, x.dtype)
    numbers = (x.data_ptr(), address, out.data_ptr(), x.numel(), PIECE, *others)
    fields = _fields(len(numbers))(*numbers)
    pieces, threads = -(-x.numel() // PIECE), torch.get_num_threads()
    launch(_kernel(name, x.dtype), fields, pieces, threads, held)
    return out


@unwatched
def activate(x: Tensor, activation: int, limit: float = 0.0) -> Tensor:
    """Compute an activation (``activations.SILU`` and so on) of all numbers of a contiguous tensor.

    ``limit``: of ``CAP``.
    """
    number = ctypes.c_float(limit)
    return _each("activate", x, ctypes.addressof(number), number, activation)


@unwatched
def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Return rows of a table.

    Args:
        ids: contiguous int64 [...], each the number of a row.
        table: [rows, size] of a dtype in ``FORMS``; the numbers of a row are contiguous.

    Returns:
        Contiguous [..., size].
    """
    size = table.shape[1]
    out = empty((*ids.shape, size), table.dtype)
    stride = table.stride(0) * table.itemsize
    fields = _fields(6)(table.data_ptr(), stride, size, ids.data_ptr(), ids.numel(), out.data_ptr())
    launch(_kernel("embed", table.dtype), fields, 1, held=table)
    return out


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor in its own dtype or in float32."""
    if x.dtype == dtype:
        return x
    out = empty(x.shape, dtype)
    fields = _fields(3)(x.data_ptr(), out.data_ptr(), out.numel())
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
    fields = _fields(4)(x.data_ptr(), out.data_ptr(), rows, size // 2)
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
    fields = _fields(4)(x.data_ptr(), out.data_ptr(), rows, groups)
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
    numbers = (batch, key_heads, heads // key_heads, tokens, size, width)
    fields = _fields(11)(query.data_ptr(), out.data_ptr(), *_strides(query), *numbers)
    launch(_kernel("pack", query.dtype), fields, 1)
    return out

"""Attention of few tokens on a CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from token_recycling.model.cpu import attention_kernel
from token_recycling.model.cpu.threads import openmp
from token_recycling.model.cpu.vectors import FORMS, processor
from token_recycling.util.modes import without_autocast

# The trial of kernel and PyTorch: numbers of rows, how often each is measured, and the ratio of
# their times below which the kernel is used.
TRIAL_ROWS, ROUNDS, CLEAR = (4, 8, 12, 16), 9, 0.97


@lru_cache
def _kernel(dtype: torch.dtype) -> Any:
    """Return the kernel for a dtype of keys, compiled at the first call."""
    return attention_kernel.compile_kernel(FORMS[dtype])


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether ``attend`` takes these, and is faster than PyTorch."""
    dtype, rows = query.dtype, query.shape[1] // key.shape[1] * query.shape[2]
    return (
        query.is_cpu
        and dtype in FORMS
        and key.dtype == value.dtype == dtype
        and key.stride(3) == value.stride(3) == 1
        and max(key.shape[3], value.shape[3]) <= attention_kernel.MOST_SIZE
        and query.numel() > 0
        and rows >= _fewest_rows(dtype)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _fewest_rows(dtype: torch.dtype) -> float:
    """Return the fewest queries that attend with one head of keys for which the kernel is used."""
    usable = processor().lanes > 0 and openmp() is not None
    return _trial(dtype, torch.get_num_threads()) if usable else inf


@lru_cache
def _trial(dtype: torch.dtype, threads: int) -> float:
    """Measure it once, in some milliseconds.

    PyTorch is faster for a row or two, and where it has matrix instructions for bfloat16. In half
    precision the kernel takes all numbers of rows or none: a token alone then has the same bits as
    in a tree, which its rounding could show.
    """
    tried = TRIAL_ROWS if dtype == torch.float32 else TRIAL_ROWS[-1:]
    found = next((rows for rows in tried if _ratio(dtype, rows) < CLEAR), inf)
    return found if dtype == torch.float32 or found == inf else 1


def _ratio(dtype: torch.dtype, rows: int) -> float:
    """Return the kernel's time relative to PyTorch's with 1,000 keys."""
    with torch.inference_mode(), without_autocast(torch.device("cpu")):
        query = torch.linspace(-1, 1, 4 * rows * 64).to(dtype).view(1, 4, rows, 64)
        key = torch.linspace(-1, 1, 4 * 1000 * 64).to(dtype).view(1, 4, 1000, 64)
        mask = query.new_zeros(1, 1, rows, 1000)
        packed = pack_mask(mask, 1)
        ways: dict[Callable[[], Tensor], list[float]] = {
            lambda: scaled_dot_product_attention(query, key, key, attn_mask=mask): [],
            lambda: attend(query, key, key, packed, 0.125): [],
        }
        for _ in range(ROUNDS):
            for run, times in ways.items():
                before = perf_counter()
                run()
                times.append(perf_counter() - before)
    torchs, ours = map(min, ways.values())
    return ours / torchs


def pack_mask(mask: Tensor, group: int) -> Tensor:
    """Return an additive mask [B, 1, q, s] as the kernel reads it, float32 [B, s, width].

    ``width`` is ``group * q``, rounded up to whole vectors.
    """
    if torch.compiler.is_compiling():
        packed: Tensor = torch.ops.token_recycling.pack_mask(mask, group)
        return packed
    return _pack_mask(mask, group)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute softmax(query key^T scale + mask) value.

    Args:
        query: [B, heads, q, size].
        key: [B, heads / group, s, size]; numbers of a slot are contiguous.
        value: [B, heads / group, s, value size]; likewise.
        mask: from ``pack_mask``, of at least s slots.
        scale: of the scores.

    Returns:
        [B, q, heads, value size].
    """
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.token_recycling.attend(query, key, value, mask, scale)
        return found
    return _attend(query, key, value, mask, scale)


def _width(rows: int) -> int:
    """Return ``rows``, rounded up to whole vectors."""
    lanes = processor().lanes
    return -(-rows // lanes) * lanes


def _pack_mask(mask: Tensor, group: int) -> Tensor:
    batch, _, tokens, slots = mask.shape
    rows = group * tokens
    packed = mask.new_zeros(batch, slots, _width(rows), dtype=torch.float32)
    by_slot = mask[:, 0].transpose(1, 2)[:, :, None].expand(batch, slots, group, tokens)
    packed[:, :, :rows].view(batch, slots, group, tokens).copy_(by_slot)
    return packed


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, tokens, size = query.shape
    key_heads, slots, value_size = key.shape[1], key.shape[2], value.shape[3]
    group, width = heads // key_heads, mask.shape[2]
    queries = query.new_zeros(batch, key_heads, size, width, dtype=torch.float32)
    queries[..., : group * tokens].view(batch, key_heads, size, group, tokens).copy_(
        query.view(batch, key_heads, group, tokens, size).permute(0, 1, 4, 2, 3)
    )
    blocks = -(-slots // attention_kernel.KEYS)
    parts = mask.new_empty(batch * key_heads * blocks * (value_size + 2) * width)
    out = mask.new_empty(batch, tokens, heads, value_size)
    number = ctypes.c_float(scale)
    k, v = key.element_size(), value.element_size()
    fields = (ctypes.c_int64 * (attention_kernel.FIELDS + batch * key_heads))(
        queries.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        mask.data_ptr(),
        parts.data_ptr(),
        out.data_ptr(),
        ctypes.addressof(number),
        batch,
        key_heads,
        slots,
        size,
        value_size,
        tokens,
        group,
        width,
        key.stride(0) * k,
        key.stride(1) * k,
        key.stride(2) * k,
        value.stride(0) * v,
        value.stride(1) * v,
        value.stride(2) * v,
        mask.stride(0) * 4,
    )
    parallel = openmp()
    assert parallel is not None
    parallel(_kernel(key.dtype).address, fields, torch.get_num_threads(), 0)
    return out.to(query.dtype)


# For compiled steps, which cannot look into the kernel.
_opaque_pack_mask = torch.library.custom_op("token_recycling::pack_mask", mutates_args=())(
    _pack_mask
)
_opaque_attend = torch.library.custom_op("token_recycling::attend", mutates_args=())(_attend)


@_opaque_pack_mask.register_fake
def _(mask: Tensor, group: int) -> Tensor:
    batch, _, tokens, slots = mask.shape
    return mask.new_empty(batch, slots, _width(group * tokens), dtype=torch.float32)


@_opaque_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[3])

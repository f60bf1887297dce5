"""Writing the keys and values of a step to their slots of a cache, as one Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from token_recycling.util.launch import launch

STRIDES = [f"{a}_{b}" for a in ("key", "value") for b in ("row", "head", "token")]
STRIDES += [f"{a}_{b}" for a in ("keys", "values") for b in ("row", "head", "slot")]


@triton.jit(do_not_specialize=["heads", "key_size", "value_size", *STRIDES])
def _write(
    keys,
    values,
    key,
    value,
    slots,
    heads,
    key_size,
    value_size,
    keys_row,
    keys_head,
    keys_slot,
    values_row,
    values_head,
    values_slot,
    key_row,
    key_head,
    key_token,
    value_row,
    value_head,
    value_token,
    WIDTH: tl.constexpr,
):
    """Copy one head of one token, of keys and of values."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = tl.program_id(1)
    slot = tl.load(slots + token)
    entry = tl.arange(0, WIDTH)
    source = key + row * key_row + head * key_head + token * key_token
    target = keys + row * keys_row + head * keys_head + slot * keys_slot
    inside = entry < key_size
    tl.store(target + entry, tl.load(source + entry, mask=inside), mask=inside)
    source = value + row * value_row + head * value_head + token * value_token
    target = values + row * values_row + head * values_head + slot * values_slot
    inside = entry < value_size
    tl.store(target + entry, tl.load(source + entry, mask=inside), mask=inside)


def write(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write the states of a step to a layer's cache.

    Args:
        keys: [B, heads, s, size], changed; entries of a head are contiguous.
        values: likewise, of any other size.
        key: [B, heads, n, size], of the dtype of ``keys``; entries of a head are contiguous.
        value: likewise.
        slots: int64 [n].
    """
    batch, heads, tokens, size = key.shape
    launch(
        _write,
        (batch * heads, tokens),
        *(keys, values, key, value, slots),
        *(heads, size, value.shape[3]),
        *(*keys.stride()[:3], *values.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        WIDTH=triton.next_power_of_2(max(size, value.shape[3])),
        num_warps=1,
    )

"""Attention of few tokens on a CPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skinny_kernels import attention_kernel as kernels
from skinny_kernels import team
from skinny_kernels.compiled import as_array, compiled
from skinny_kernels.elementwise import packed_queries
from skinny_kernels.launch import empty, fields_of, launch, this_thread, unwatched
from skinny_kernels.machine_code import Kernel
from skinny_kernels.vectors import DTYPES, processor
from skinny_kernels.windows import CHUNKED, FULL, RULES, SLIDING, AttentionWindow

# Attribute of a mask that requests packed queries: its ``Packing``.
PACKED = "skinny_kernels_packed"


class Packing:
    """What is known of a mask [B, 1, q, s] of queries whose keys are in the last q slots.

    Attributes:
        committed: int64 [B] on the host, each row's slots before them; the others are hidden.
        kind: the type of the layers that it is for; None: of all.
        masks: that mask packed, by heads in a group.
    """

    def __init__(self, committed: Tensor, kind: str | None = None) -> None:
        self.committed, self.kind = committed, kind
        self.masks: dict[int, Tensor] = {}


@lru_cache
def _kernel(dtype: torch.dtype) -> Kernel:
    """Return the kernel for a dtype of keys, compiled at the first call."""
    return Kernel(kernels.attend, DTYPES[dtype], in_pieces=True, counter=kernels.FINISHED)


def fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether ``attend`` takes these; the mask is not yet packed.

    It then takes one token as well: it has the same bits as in a tree.
    """
    return (
        query.is_cpu
        and mask.shape[3] == key.shape[2]
        and query.dtype in DTYPES
        and key.dtype == value.dtype == query.dtype
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and max(key.shape[3], value.shape[3]) <= kernels.MOST_SIZE
        and 0 < query.shape[2] <= kernels.MOST_TOKENS
        and query.numel() > 0
        and is_available()
        and not torch.compiler.is_compiling()  # the caller compiles the model
    )


def is_available() -> bool:
    """Return whether this processor and PyTorch's build run the kernels."""
    return processor().lanes > 0 and team.is_available()


def packed_mask(mask: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return mask and committed slots for ``attend``, of a mask that ``PACKED`` marks."""
    packing: Packing = getattr(mask, PACKED)
    if group not in packing.masks:
        packing.masks[group] = pack_mask(mask, packing.committed, group)
    if this_thread.recorder is not None:
        this_thread.recorder.note_mask(packing.masks[group], packing.kind)
    return packing.masks[group], packing.committed


@unwatched
def pack_mask(mask: Tensor, committed: Tensor, group: int) -> Tensor:
    """Return an additive mask [B, 1, q, s] as the kernel reads it, float32 [B, s, width].

    Its slots are a row's committed ones (see ``Packing``), and the last q behind them; ``width`` is
    ``group * q``, rounded up to whole vectors.
    """
    batch, _, tokens, slots = mask.shape
    rows = group * tokens
    packed = mask.new_zeros(batch, slots, _width(rows), dtype=torch.float32)
    by_slot = mask[:, 0].transpose(1, 2)
    if batch > 1:  # a single row skips nothing
        at = torch.arange(slots, device="cpu").expand(batch, slots)
        skipped = (slots - tokens - committed)[:, None]
        at = torch.where(at < committed[:, None], at, at + skipped).clamp_(max=slots - 1)
        by_slot = by_slot.gather(1, at[:, :, None].expand(batch, slots, tokens))
    by_slot = by_slot[:, :, None].expand(batch, slots, group, tokens)
    packed[:, :, :rows].view(batch, slots, group, tokens).copy_(by_slot)
    return packed


@compiled
def _hide(
    out: Any,
    committed: Any,
    positions: Any,
    ancestors: Any,
    rule: Any,
    size: Any,
    group: Any,
    lowest: Any,
) -> None:
    """Write ``lowest`` to ``out`` where a token does not see a slot (see ``draft_mask``)."""
    batch, tokens = positions.shape
    for b in range(batch):
        length = committed[b]
        # Without a window, all tokens see the slots before them.
        for slot in range(length if rule == FULL else 0, length + tokens):
            own = slot - length
            at = slot if own < 0 else positions[b, own]
            for t in range(tokens):
                seen = own < 0 or ancestors[b, t, own]
                if rule == SLIDING:
                    seen = seen and positions[b, t] - at < size
                elif rule == CHUNKED:
                    seen = seen and positions[b, t] // size == at // size
                if not seen:
                    for g in range(group):
                        out[b, slot, g * tokens + t] = lowest


def draft_mask(
    committed: Any,
    positions: Tensor,
    ancestors: Tensor,
    window: AttentionWindow,
    group: int,
    dtype: torch.dtype,
) -> Any:
    """Return the mask of a draft as ``pack_mask`` packs it, float32 [B, s, width].

    Args:
        committed: array int64 [B] (see ``Packing``).
        positions: int64 [B, q], of the draft's tokens.
        ancestors: bool [B, q, q], which of them each one sees.
        window: of the layers.
        group: heads in a group.
        dtype: whose lowest value hides a slot.
    """
    batch, tokens = positions.shape
    out = np.zeros((batch, int(committed.max()) + tokens, _width(group * tokens)), np.float32)
    rule, lowest = RULES.index(window.rule), np.float32(torch.finfo(dtype).min)
    seen = as_array(positions), as_array(ancestors)
    _hide(out, committed, *seen, rule, window.size, group, lowest)
    return out


@unwatched
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    committed: Tensor,
    scale: float,
    cap: float = 0.0,
) -> Tensor:
    """Compute softmax(query key^T scale + mask) value.

    Args:
        query: [B, heads, q, size].
        key: [B, heads / group, s, size]; numbers of a slot are contiguous.
        value: [B, heads / group, s, value size]; likewise.
        mask: from ``pack_mask``.
        committed: int64 [B] on the host (see ``Packing``).
        scale: of the scores.
        cap: if not 0, scaled scores s become cap tanh(s / cap).

    Returns:
        [B, q, heads, value size].
    """
    batch, heads, tokens, size = query.shape
    key_heads, value_size, width = key.shape[1], value.shape[3], mask.shape[2]
    queries = packed_queries(query, key_heads, width)
    out = empty((batch, tokens, heads, value_size), query.dtype)
    numbers = (ctypes.c_float * 2)(scale, cap)
    words = {
        kernels.QUERIES: queries.data_ptr(),
        kernels.OUT: out.data_ptr(),
        kernels.SCALE: ctypes.addressof(numbers),
        kernels.BATCH: batch,
        kernels.HEADS: key_heads,
        kernels.SIZE: size,
        kernels.VALUE_SIZE: value_size,
        kernels.TOKENS: tokens,
        kernels.GROUP: heads // key_heads,
        kernels.WIDTH: width,
        **entries(key, value),
    }
    slots = key.shape[2]
    blocks = kernels.blocks_of(slots, tokens)
    parts = np.empty(part_floats(words) * blocks, np.float32)
    words |= per_step(slots, mask.numpy(), committed.numpy(), parts)
    fields = fields_of(words, zeros=batch * key_heads)
    if this_thread.recorder is not None:
        this_thread.recorder.rebind_attention(fields, key, mask)
    threads = torch.get_num_threads()
    pieces = heads_of(fields) * blocks
    launch(_kernel(key.dtype), fields, pieces, threads, (numbers, parts, committed))
    return out


def heads_of(fields: Any) -> int:
    """Return the heads of all rows in a launch, each of which has a piece for every block."""
    return int(fields[kernels.BATCH] * fields[kernels.HEADS])


def part_floats(fields: Any) -> int:
    """Return the float32 numbers of the parts of a launch, for each block."""
    return heads_of(fields) * int((fields[kernels.VALUE_SIZE] + 2) * fields[kernels.WIDTH])


def deepest(committed: int) -> int:
    """Return the depth of the deepest node whose sums have the bits of a step of its own.

    Args:
        committed: tokens of a row before the draft.
    """
    return kernels.KEYS - 1 - committed % kernels.KEYS


def _width(rows: int) -> int:
    """Return ``rows``, rounded up to whole vectors."""
    lanes = processor().lanes
    return -(-rows // lanes) * lanes


def entries(key: Tensor, value: Tensor) -> dict[int, int]:
    """Return the fields of a layer's cache, words by their positions."""
    words = {kernels.KEY: key.data_ptr(), kernels.VALUE: value.data_ptr()}
    for tensor, first in ((key, kernels.KEY_BATCH), (value, kernels.VALUE_BATCH)):
        words.update(enumerate((n * tensor.itemsize for n in tensor.stride()[:3]), first))
    return words


def per_step(slots: int, mask: Any, committed: Any, parts: Any) -> dict[int, int]:
    """Return the fields that are the same in all layers of a step, words by their positions.

    Args:
        slots: of the cache, those of the queries' own tokens included.
        mask: array (see ``attend``).
        committed: array (see ``attend``).
        parts: array float32 [``part_floats`` times blocks], which the pieces write to.
    """
    return {
        kernels.SLOTS: slots,
        kernels.MASK: mask.ctypes.data,
        kernels.PARTS: parts.ctypes.data,
        kernels.MASK_BATCH: mask.strides[0],
        kernels.COMMITTED: committed.ctypes.data,
    }

"""Attention windows, and masks of a draft tree that respect them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

RULES = ("full", "sliding", "chunked")  # kernels are given an index
FULL, SLIDING, CHUNKED = range(3)


class AttentionWindow(NamedTuple):
    """The attention window of a layer type: ``size`` in positions; ``full`` has no limit."""

    rule: Literal["full", "sliding", "chunked"]
    size: int = 0


def additive_masks(
    windows: dict[str, AttentionWindow],
    visible: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Build the ``attention_mask`` argument of a Transformers model.

    Args:
        windows: by layer type.
        visible: bool [B, q, s]; whether the tree, windows aside, lets query q see key s.
        query_positions: int64 [B, q].
        key_positions: int64 [B, s].
        dtype: of the model's queries. Masks are additive (0 or the lowest value) because eager
            attention adds its mask: a bool mask would be silently wrong.

    Returns:
        [B, 1, q, s], or a dict of these by layer type for a model with several types.
    """
    masks = {}
    for kind, window in windows.items():
        seen = visible
        if window.rule == "sliding":
            seen = visible & (query_positions[:, :, None] - key_positions[:, None] < window.size)
        elif window.rule == "chunked":
            chunks = query_positions[:, :, None] // window.size
            seen = visible & (chunks == key_positions[:, None] // window.size)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        masks[kind] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))

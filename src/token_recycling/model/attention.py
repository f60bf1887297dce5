"""Tree attention that reads each key and value once for all query heads of a group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MARK = "token_recycling_packs"  # attribute of a mask that requests packed queries
UNKNOWN = ("position_bias", "softcap")  # options that alter the scores; left to the stock function
Attention = Callable[..., "tuple[Tensor, Tensor | None]"]


def packed_attention(
    stock: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the queries of all heads of a group packed into one head.

    With a mask, Transformers repeats keys and values for every head of the group, which copies
    the whole cache. This function repeats only the mask. It calls ``stock`` unless
    ``pack_queries`` has marked the mask.

    Args:
        stock: the attention function that this one replaces.
        module: the attention layer.
        query: [B, heads, q, size].
        key: [B, heads / group, s, size].
        value: like ``key``.
        attention_mask: additive [B, 1, q, s].
        **others: as for sdpa; ``scaling`` multiplies the scores.

    Returns:
        The output [B, q, heads, size], and None in place of the attention weights.
    """
    if attention_mask is None or getattr(attention_mask, MARK, False) is not True:
        return stock(module, query, key, value, attention_mask, **others)
    batch, heads, q, size = query.shape
    group = heads // key.shape[1]
    shared = attention_mask.shape[1] == 1
    if group == 1 or not shared or any(others.get(name) is not None for name in UNKNOWN):
        return stock(module, query, key, value, attention_mask, **others)
    packed = query.reshape(batch, key.shape[1], group * q, size)
    mask = attention_mask[..., : key.shape[2]].repeat(1, 1, group, 1)
    scale = others.get("scaling")
    out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, q, -1).transpose(1, 2).contiguous(), None


def install() -> None:
    """Register ``packed_attention`` as sdpa for the rest of this process.

    Model code looks up its attention function by the name in the model's configuration, which is
    common to all threads, so the request to pack is attached to the mask instead. Unmarked masks
    are handled as before.
    """
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(stock, "func", None) is not packed_attention:
        AttentionInterface.register("sdpa", partial(packed_attention, stock))


def pack_queries(masks: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Mark ``masks`` (see ``masks.additive_masks``) so that sdpa packs their queries.

    Only for forwards of few tokens: with many, the repeated mask is larger than the keys.
    """
    for mask in masks.values() if isinstance(masks, dict) else (masks,):
        setattr(mask, MARK, True)
    return masks

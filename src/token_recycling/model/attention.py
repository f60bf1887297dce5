"""Tree attention that reads every key and value once, however many query heads share it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MARK = "token_recycling_packs"  # attribute of a mask whose queries are to be packed
UNKNOWN = ("position_bias", "softcap")  # what changes the products; Transformers sees to it
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
    """Attend with the queries of a group of heads side by side, as more queries of one head.

    Where there is a mask, Transformers' own way is to repeat keys and values for every head of
    the group: that copies the whole cache. Here only the mask is repeated. Without the mark of
    ``pack_queries`` on the mask this is ``stock``.

    Args:
        stock: the attention function in whose place this one stands.
        module: the layer.
        query: [B, heads, q, size].
        key: [B, heads / group, s, size].
        value: like ``key``.
        attention_mask: additive [B, 1, q, s].
        **others: as for sdpa; ``scaling`` is the factor of the products.

    Returns:
        [B, q, heads, size], and no weights.
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
    """Let sdpa look for the mark on its masks, in this process and from now on.

    Model code looks its attention function up by the name in the model's configuration, which
    all threads share, so the request to pack travels with the mask instead. For masks of others
    nothing changes.
    """
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(stock, "func", None) is not packed_attention:
        AttentionInterface.register("sdpa", partial(packed_attention, stock))


def pack_queries(masks: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Mark ``masks`` (see ``masks.additive_masks``), so that sdpa packs the queries under them.

    Only for forwards of few tokens: in a long one the mask would outgrow the keys.
    """
    for mask in masks.values() if isinstance(masks, dict) else (masks,):
        setattr(mask, MARK, True)
    return masks

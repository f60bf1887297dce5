"""Tree attention that reads every key and value once, however many query heads share it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "token_recycling_packed"
UNKNOWN = ("position_bias", "softcap")  # what changes the products; Transformers sees to it


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with the queries of a group of heads side by side, as more queries of one head.

    Where there is a mask, Transformers' own way is to repeat keys and values for every head of
    the group: that copies the whole cache. Here only the mask is repeated.

    Args:
        module: the layer.
        query: [B, heads, q, size].
        key: [B, heads / group, s, size].
        value: like ``key``.
        attention_mask: additive [B, 1, q, s].
        **others: as for sdpa; ``scaling`` is the factor of the products.

    Returns:
        [B, q, heads, size], and no weights.
    """
    batch, heads, q, size = query.shape
    group = heads // key.shape[1]
    shared = attention_mask is not None and attention_mask.shape[1] == 1
    if group == 1 or not shared or any(others.get(name) is not None for name in UNKNOWN):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **others
        )
        return found
    assert attention_mask is not None
    packed = query.reshape(batch, key.shape[1], group * q, size)
    mask = attention_mask[..., : key.shape[2]].repeat(1, 1, group, 1)
    scale = others.get("scaling")
    out = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, q, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class PackedHeads:
    """While entered, a model whose attention is sdpa packs its heads.

    Only for forwards of few tokens: in a long one the mask would outgrow the keys.
    """

    def __init__(self, config: Any) -> None:
        """Switch the model of this (text) ``config``."""
        self.config = config

    def __enter__(self) -> None:
        self._switched = getattr(self.config, "_attn_implementation", None) == "sdpa"
        if self._switched:
            self.config._attn_implementation = NAME

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._switched:
            self.config._attn_implementation = "sdpa"

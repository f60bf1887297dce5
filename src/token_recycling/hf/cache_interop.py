"""Conversion between our KV cache and the stock ``DynamicCache`` passed between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from token_recycling.drafting.draft import chains
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.model.target import TreeTarget

PADDING_CHUNK = 16  # tokens per forward; each one's logits are computed, though unneeded


def extendable(cache: Any) -> bool:
    """Return whether a cache can be continued: it is empty, or all layers have full length."""
    return (
        type(cache) is DynamicCache
        and not getattr(cache, "offloading", False)
        and (cache.get_seq_length() == 0 or all(type(x) is DynamicLayer for x in cache.layers))
    )


def from_dynamic(cache: Any, layers: int, dtype: torch.dtype) -> RecyclingCache:
    """Copy a stock cache of one row into our own, as ``dtype``."""
    copied = RecyclingCache(layers, 1)
    length = cache.get_seq_length()
    copied.reserve(length)
    for layer, given in zip(copied.layers, cache.layers):
        if given.is_initialized and given.keys.numel():  # false if it uses another layer's
            layer.update(given.keys.to(dtype), given.values.to(dtype))
    copied.lengths = [length]
    return copied


def to_dynamic(own: RecyclingCache, cache: Any) -> None:
    """Replace the contents of a stock cache with all entries of ``own``.

    Every layer, including those with sliding windows, gets its full length: stock attention then
    applies the window in its mask, and ``from_dynamic`` can continue from the cache.
    """
    filled = DynamicCache()
    for index, layer in enumerate(own.layers):
        if layer.is_initialized:
            keys, values = (_padded(x, own.lengths) for x in (layer.keys, layer.values))
            filled.update(keys, values, index)
    cache.layers = filled.layers


def _padded(entries: Tensor, lengths: list[int]) -> Tensor:
    """Return [B, heads, longest, size], zero-padded on the left as stock batches are padded."""
    if len(lengths) == 1:
        return entries[:, :, : lengths[0]]
    longest = max(lengths)
    shifted = entries.new_zeros(*entries.shape[:2], longest, entries.shape[3])
    for row, length in enumerate(lengths):
        shifted[row, :, longest - length :] = entries[row, :, :length]
    return shifted


def read_padding(target: TreeTarget, tokens: list[list[int]], pad: int) -> None:
    """Feed rows that ended early the padding that stock batches feed them.

    Args:
        target: has read all tokens of each row except the last.
        tokens: the new tokens per row.
        pad: id of the padding token.
    """
    missing = [max(map(len, tokens)) - len(row) for row in tokens]
    rows = torch.full((len(tokens), max(missing)), pad, device=target.device)
    rows[:, :1] = torch.tensor([row[-1:] for row in tokens], device=target.device)
    for begin in range(0, rows.shape[1], PADDING_CHUNK):
        part = rows[:, begin : begin + PADDING_CHUNK]
        size = part.shape[1]
        target.verify(chains(part))
        nodes = torch.arange(size, device=target.device).expand_as(part)
        target.commit(nodes, [min(max(n - begin, 0), size) for n in missing])

"""Attention masks of a draft tree, one per kind of layer."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from token_recycling.errors import TokenRecyclingError


class Reach(NamedTuple):
    """How far back a kind of layer sees, in positions (``size``); ``full`` has no limit."""

    rule: Literal["full", "sliding", "chunked"]
    size: int = 0


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the language model."""
    return config.get_text_config(decoder=True)


def vocabulary(model: Any) -> int:
    """Return how many tokens ``model`` can both write and read.

    That is ``vocab_size`` of its configuration, but for a model whose embeddings and projection
    are both wider, or whose embeddings are narrower.
    """
    size = int(text_config(model.config).vocab_size)
    written = getattr(model.get_output_embeddings(), "out_features", None)
    read = getattr(model.get_input_embeddings(), "num_embeddings", None)
    size = max(size, written or 0)
    return int(min(size, read or size))


def input_device(model: Any) -> torch.device:
    """Return where ``model`` takes its tokens: the weights of an offloaded layer lie elsewhere."""
    embeddings = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None)  # accelerate's
    device = getattr(hook, "execution_device", None)
    return torch.device(embeddings.weight.device if device is None else device)


def layer_reaches(config: Any) -> dict[str, Reach]:
    """Read the kinds of attention layers and their windows from a model's configuration.

    Returns:
        layer type -> reach.

    Raises:
        TokenRecyclingError: a layer keeps a state that tree attention cannot branch.
    """
    config = text_config(config)
    window = getattr(config, "sliding_window", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if not kinds:
        kinds = ["sliding_attention" if window else "full_attention"]
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        raise TokenRecyclingError("its local layers count their window in cache slots")
    reaches = {}
    for kind in kinds:
        if kind == "full_attention":
            reaches[kind] = Reach("full")
        elif kind == "sliding_attention" and window:
            reaches[kind] = Reach("sliding", int(window))
        elif kind == "chunked_attention":
            reaches[kind] = Reach("chunked", int(config.attention_chunk_size))
        else:
            raise TokenRecyclingError(f"its layers of type {kind} keep a state without branches")
    return reaches


def additive_masks(
    reaches: dict[str, Reach],
    visible: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Build what a Transformers model takes as ``attention_mask``.

    Args:
        reaches: from ``layer_reaches``.
        visible: bool [B, q, s]; key s may be seen by query q as far as the tree goes.
        query_positions: int64 [B, q].
        key_positions: int64 [B, s].
        dtype: of the model's queries. The masks are additive (0 or the lowest value): eager
            attention adds its mask, so a bool mask would be silently wrong there.

    Returns:
        [B, 1, q, s], or a dict of them by layer type where a model has several types.
    """
    masks = {}
    for kind, reach in reaches.items():
        seen = visible
        if reach.rule == "sliding":
            seen = visible & (query_positions[:, :, None] - key_positions[:, None] < reach.size)
        elif reach.rule == "chunked":
            own = query_positions[:, :, None] // reach.size
            seen = visible & (own == key_positions[:, None] // reach.size)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        masks[kind] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))

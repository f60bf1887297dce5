"""A model's vocabulary, positions and attention windows, from its configuration."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from skinny_kernels.known_forms import GROWING_ROPE
from skinny_kernels.windows import AttentionWindow
from token_recycling.errors import TokenRecyclingError

TREE_ROOM = 256  # slots reserved for the nodes of a draft
SHORTEST_CONTEXT = 64  # models with a lower slot limit are refused


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the language model."""
    return config.get_text_config(decoder=True)


def head_shapes(config: Any) -> tuple[int, int, int]:
    """Return the heads of queries, those of keys and values, and the entries of a head."""
    config = text_config(config)
    heads = int(config.num_attention_heads)
    shared = getattr(config, "num_key_value_heads", None) or heads
    return heads, int(shared), int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def config_digest(config: Any) -> str:
    """Return a hash of the text configuration without names, versions and the dtype."""
    values = text_config(config).to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "widened"):
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def vocabulary(model: Any) -> int:
    """Return the number of tokens that ``model`` can both output and embed.

    This is the configuration's ``vocab_size``, unless embeddings and LM head are both larger, or
    the embeddings are smaller.
    """
    size = int(text_config(model.config).vocab_size)
    written = getattr(model.get_output_embeddings(), "out_features", None)
    read = getattr(model.get_input_embeddings(), "num_embeddings", None)
    size = max(size, written or 0)
    return int(min(size, read or size))


def input_device(model: Any) -> torch.device:
    """Return the device of ``model``'s inputs; an offloaded layer's weights are elsewhere."""
    embeddings = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None)  # accelerate's
    device = getattr(hook, "execution_device", None)
    return torch.device(embeddings.weight.device if device is None else device)


def attention_windows(config: Any) -> dict[str, AttentionWindow]:
    """Return the attention window of each layer type in a model's configuration.

    Raises:
        TokenRecyclingError: a layer keeps a state that a tree cannot branch, or counts its window
            in cache slots.
    """
    config = text_config(config)
    window = getattr(config, "sliding_window", None)
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if not kinds:
        kinds = ["sliding_attention" if window else "full_attention"]
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        raise TokenRecyclingError("its local layers measure their window in cache slots")
    windows = {}
    for kind in kinds:
        if kind == "full_attention":
            windows[kind] = AttentionWindow("full")
        elif kind == "sliding_attention" and window:
            windows[kind] = AttentionWindow("sliding", int(window))
        elif kind == "chunked_attention":
            windows[kind] = AttentionWindow("chunked", int(config.attention_chunk_size))
        else:
            raise TokenRecyclingError(f"its {kind} layers keep a state that cannot branch")
    return windows


def context_limit(config: Any) -> int | None:
    """Return the number of positions the model supports, or None if its configuration omits it.

    Models with longrope (Phi-3's long versions) switch to a second set of rotary factors at their
    original length, which makes earlier cache entries stale, so that length is the limit.
    """
    config = text_config(config)
    limit = getattr(config, "max_position_embeddings", None) or 0
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        original = getattr(config, "original_max_position_embeddings", None)
        limit = original or rope.get("original_max_position_embeddings") or limit
    return int(limit) if limit > 0 else None


def position_limit(config: Any) -> int | None:
    """Return the number of positions at which trees can be computed, or None if unlimited.

    With a RoPE type in ``GROWING_ROPE``, trees beyond ``context_limit`` still give what
    ``generate`` gives. A table of learned positions ends there, and other RoPE types change their
    factors.
    """
    config = text_config(config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not rope and getattr(config, "rope_theta", None) is None:
        return context_limit(config)
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    kinds = {part.get("rope_type", part.get("type", "default")) for part in parts}
    return None if kinds <= GROWING_ROPE else context_limit(config)


def slot_limit(config: Any) -> int | None:
    """Return the cache slots within which attention depends only on masks and positions.

    Some models have a rule that depends on the slot and applies only beyond the probe's length.
    Beyond that slot, siblings in a tree would be computed differently from their paths.

    Returns:
        The slots available to a context, after reserving room for a tree; None without such a
        rule.

    Raises:
        TokenRecyclingError: the rule applies too early to leave a usable context.
    """
    config = text_config(config)
    begins = []
    if getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers):
        begins.append(config.floor_scale - 1)  # Llama 4 scales queries by slot
    if window := getattr(config, "keep_window_size", None):
        begins.append(window)  # Doge keeps this many keys and breaks ties by slot
    if not begins:
        return None
    limit = min(begins) - TREE_ROOM
    if limit < SHORTEST_CONTEXT:
        raise TokenRecyclingError(
            f"its attention depends on the cache slot beyond slot {min(begins)}"
        )
    return int(limit)


def least(*limits: int | None) -> int | None:
    """Return the lowest limit that is not None, or None."""
    return min((limit for limit in limits if limit is not None), default=None)


def check_prompts(prompts: list[list[int]], limit: int | None) -> None:
    """Check that prompts can be read.

    Raises:
        TokenRecyclingError: a prompt is empty, or leaves no room in the context.
    """
    for prompt in prompts:
        if not prompt:
            raise TokenRecyclingError("the prompt is empty")
        if limit is not None and len(prompt) >= limit:
            raise TokenRecyclingError(
                f"the prompt has {len(prompt)} tokens, too many for the model's context "
                f"of {limit}; shorten it"
            )

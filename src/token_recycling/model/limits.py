"""What a model's configuration says of its vocabulary, its positions and its attention windows."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from token_recycling.errors import TokenRecyclingError

# Rotary kinds whose angles are the same function of the position at every length.
GROWING_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
TREE_ROOM = 256  # slots kept free for the nodes of a draft
SHORTEST_CONTEXT = 64  # below this a limit is a refusal


class AttentionWindow(NamedTuple):
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


def attention_windows(config: Any) -> dict[str, AttentionWindow]:
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
    windows = {}
    for kind in kinds:
        if kind == "full_attention":
            windows[kind] = AttentionWindow("full")
        elif kind == "sliding_attention" and window:
            windows[kind] = AttentionWindow("sliding", int(window))
        elif kind == "chunked_attention":
            windows[kind] = AttentionWindow("chunked", int(config.attention_chunk_size))
        else:
            raise TokenRecyclingError(f"its layers of type {kind} keep a state without branches")
    return windows


def context_limit(config: Any) -> int | None:
    """Positions that the model knows, or None where its configuration does not say.

    A model with two sets of rotary factors (longrope: Phi-3's long versions) changes them at its
    original length; entries computed before would be stale, so that is the limit here.
    """
    config = text_config(config)
    limit = getattr(config, "max_position_embeddings", None) or 0
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        original = getattr(config, "original_max_position_embeddings", None)
        limit = original or rope.get("original_max_position_embeddings") or limit
    return int(limit) if limit > 0 else None


def position_limit(config: Any) -> int | None:
    """Positions beyond which a tree cannot be computed, or None where rotary angles go on.

    Beyond ``context_limit`` a model with plain rotary positions still computes what ``generate``
    computes. A table of learned positions ends there, and other rotary kinds change their factors.
    """
    config = text_config(config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not rope and getattr(config, "rope_theta", None) is None:
        return context_limit(config)
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    kinds = {part.get("rope_type", part.get("type", "default")) for part in parts}
    return None if kinds <= GROWING_ROPE else context_limit(config)


def slot_limit(config: Any) -> int | None:
    """Cache slots up to which a model's attention depends on masks and positions alone.

    Some have a rule that counts slots and that begins late, longer than the probe is. In front of
    it nothing is lost; behind it siblings in a tree would not be computed like their paths.

    Returns:
        The slots that a context may use, a tree's left out; None where there is no such rule.

    Raises:
        TokenRecyclingError: the rule begins too early to leave any room.
    """
    config = text_config(config)
    begins = []
    if getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers):
        begins.append(config.floor_scale - 1)  # Llama-4 scales queries by slot
    if window := getattr(config, "keep_window_size", None):
        begins.append(window)  # Doge keeps so many keys, and breaks ties by slot
    if not begins:
        return None
    limit = min(begins) - TREE_ROOM
    if limit < SHORTEST_CONTEXT:
        raise TokenRecyclingError(f"its attention counts cache slots beyond {min(begins)}")
    return int(limit)


def least(*limits: int | None) -> int | None:
    """Return the lowest limit; None where there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def check_prompts(prompts: list[list[int]], limit: int | None) -> None:
    """Refuse prompts that cannot be read.

    Raises:
        TokenRecyclingError: a prompt is empty, or leaves no room in the context.
    """
    for prompt in prompts:
        if not prompt:
            raise TokenRecyclingError("the prompt is empty")
        if limit is not None and len(prompt) >= limit:
            raise TokenRecyclingError(
                f"the prompt has {len(prompt)} tokens and the model's context {limit}; shorten it"
            )

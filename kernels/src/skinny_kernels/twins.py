"""A model of Transformers whose forwards of few tokens are computed by the kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from skinny_kernels import attention, layers
from skinny_kernels.attention_kernel import KEYS
from skinny_kernels.linear import FEW_TOKENS
from skinny_kernels.shadow import shadow_of

Model = TypeVar("Model", bound=nn.Module)
NAME = "skinny_kernels"  # of the attention function in a configuration
# Attribute of a causal mask that was made for this function: parts of it as the kernel reads them.
PARTS = "skinny_kernels_parts"
# Types of models whose attention is known to consist of projections, rotary embeddings, this
# function and one more projection. Others may look at its name, or add to the scores.
KNOWN = {
    "gemma",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
    "starcoder2",
}
LIBRARIES = ("torch.", "transformers.", "skinny_kernels.")


def prepare(model: Model) -> Model:
    """Return a twin of a model whose forwards of at most 128 tokens the kernels compute.

    The twin has the model's weights, in the same memory, and its methods, ``generate`` among them.
    The model itself stays as it is, so there is nothing to undo: drop the twin. The kernels compute
    without gradients only; whatever they do not know is computed as in the model. A twin can be
    neither compiled nor pickled.

    Args:
        model: a ``…ForCausalLM`` in float32, bfloat16 or float16, or with packed weights (see
            ``load_gguf``), on the CPU.

    Raises:
        ValueError: the model is not on the CPU.
    """
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        raise ValueError(f"the model is on {', '.join(sorted(devices))}; the kernels need the CPU")
    configs: dict[int, Any] = {}
    if all(type(module).__module__.startswith(LIBRARIES) for module in model.modules()):
        every = (getattr(module, "config", None) for module in model.modules())
        known = {id(config): config for config in every if _is_known(config)}
        configs = {key: _with_attention(config) for key, config in known.items()}
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, causal_mask)
    twin = shadow_of(model, configs, training=False)
    layers.cover(twin, _own)
    return twin  # type: ignore[return-value]


def _is_known(config: Any) -> bool:
    """Return whether the attention of a configuration's model is replaced."""
    kind = getattr(config, "model_type", None)
    return kind in KNOWN and getattr(config, "_attn_implementation", None) == "sdpa"


def _with_attention(config: Any) -> Any:
    """Return a copy of a configuration with the attention function of this module."""
    found = copy.deepcopy(config)
    found._attn_implementation = NAME
    return found


def _own(stock: Any, *arguments: Any, **options: Any) -> Any:
    """Leave a Python module's own attention function as it is."""
    return stock(*arguments, **options)


def causal_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Return an additive mask [B, 1, q, s], marked if it is causal and of few tokens.

    None if all tokens see each other.
    """
    mask: Tensor | None = eager_mask(*arguments, **options)
    if mask is None:
        return None
    tokens = mask.shape[2]
    if tokens <= FEW_TOKENS and mask.shape[1] == 1 and tokens <= mask.shape[3]:
        later = torch.ones(tokens, tokens, dtype=torch.bool, device="cpu").triu(1)
        if bool((mask[..., -tokens:] < 0)[..., later].all()):
            setattr(mask, PARTS, {})
    return mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as Transformers' attention functions do, with the kernel where it takes the tensors.

    Args:
        module: the attention layer.
        query: [B, heads, q, size].
        key: [B, heads / group, s, size], the queries' own last.
        value: like ``key``.
        attention_mask: additive [B, 1, q, s]; the kernel attends only with those of
            ``causal_mask``.
        scaling: of the scores; None: ``size ** -0.5``.
        **others: as for sdpa.

    Returns:
        The output [B, q, heads, size], and None in place of the attention weights.
    """
    packed: dict[Any, Tensor] | None = getattr(attention_mask, PARTS, None)
    if (
        attention_mask is None
        or packed is None
        or module.training
        or torch.is_grad_enabled()
        or len(attention_mask) != len(query)
        or not attention.fits(query, key, value, attention_mask)
    ):
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return output, None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    group = query.shape[1] // key.shape[1]
    parts = []
    for part, committed in _parts(query.shape[2], key.shape[2]):
        slots = committed + part.stop - part.start
        before = torch.full((len(query),), committed, device="cpu")
        if (committed, group) not in packed:  # the same for all layers of a forward
            own = attention_mask[:, :, part, :slots]
            packed[committed, group] = attention.pack_mask(own, before, group)
        entries, mask = (key[:, :, :slots], value[:, :, :slots]), packed[committed, group]
        parts.append(attention.attend(query[:, :, part], *entries, mask, before, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None


def _parts(tokens: int, slots: int) -> Iterator[tuple[slice, int]]:
    """Yield consecutive tokens with the same block of keys, and the slots before them.

    The keys of all tokens of a call are summed up in the block of the first of them; so the next
    block begins where it does in steps of one token.
    """
    first = 0
    while first < tokens:
        committed = slots - tokens + first
        end = min(tokens, first + KEYS - committed % KEYS)
        yield slice(first, end), committed
        first = end

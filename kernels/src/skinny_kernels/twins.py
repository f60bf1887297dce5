"""A model of Transformers whose forwards of few tokens are computed by the kernels."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from skinny_kernels import attention, layers
from skinny_kernels.attention_kernel import KEYS
from skinny_kernels.known_forms import EAGER
from skinny_kernels.linear import FEW_TOKENS
from skinny_kernels.shadow import shadow_of

Model = TypeVar("Model", bound=nn.Module)
NAME = "skinny_kernels"  # of the attention function in a configuration
PACKED = "skinny_kernels_parts"  # attribute of a mask: parts of it as the kernel reads them
# Options of attention that change the scores and that neither the kernel nor PyTorch computes.
ALTERING = ("s_aux", "position_bias")


def prepare(model: Model) -> Model:
    """Return a twin of a model whose forwards of at most 128 tokens the kernels compute.

    The twin has the model's weights, in the same memory, and its methods, ``generate`` among them.
    The model itself stays as it is, so there is nothing to undo: drop the twin. It computes without
    gradients only. Whatever the kernels do not know is computed as in the model.

    Args:
        model: a ``…ForCausalLM`` in float32, bfloat16 or float16, or with packed weights (see
            ``load_gguf``), on the CPU.

    Raises:
        ValueError: the model is not on the CPU.
    """
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices - {"cpu"}:
        raise ValueError(f"the model is on {', '.join(sorted(devices))}; the kernels need the CPU")
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) in ("sdpa", "eager"):
            configs.setdefault(id(config), config)
    twins = {known: _with_attention(config) for known, config in configs.items()}
    twin = shadow_of(model, twins, training=False)
    layers.cover(twin, _capped)
    return twin  # type: ignore[return-value]


def _with_attention(config: Any) -> Any:
    """Return a copy of a configuration with the attention function of this module."""
    found = copy.copy(config)
    found._attn_implementation = NAME
    return found


def _capped(stock: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Attend in place of a Python module's own function, for scores that are capped."""
    return attend(*arguments, **options)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as Transformers' attention functions do, with the kernel where it takes the tensors.

    Args:
        module: the attention layer.
        query: [B, heads, q, size].
        key: [B, heads / group, s, size], the queries' own last.
        value: like ``key``.
        attention_mask: additive [B, 1, q, s]; None: PyTorch attends.
        scaling: of the scores; None: ``size ** -0.5``.
        softcap: scaled scores s become ``softcap * tanh(s / softcap)``.
        **others: as for sdpa.

    Returns:
        The output [B, q, heads, size], and None in place of the attention weights.
    """
    is_altered = any(others.get(name) is not None for name in ALTERING)
    if (
        attention_mask is None
        or is_altered
        or attention_mask.shape[1] != 1
        or torch.is_grad_enabled()
        or query.shape[2] > FEW_TOKENS
        or not attention.fits(query, key, value, attention_mask)
    ):
        own = softcap or is_altered
        stock: Any = getattr(sys.modules[type(module).__module__], EAGER, None) if own else None
        if stock is not None:
            others |= {"softcap": softcap} if softcap else {}
            result: tuple[Tensor, Tensor | None] = stock(
                module, query, key, value, attention_mask, scaling=scaling, **others
            )
            return result
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling
        )
        return output, None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    parts = [
        _attend(query[:, :, part], key, value, attention_mask, part, committed, scale, softcap)
        for part, committed in _parts(query.shape[2], key.shape[2])
    ]
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


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    part: slice,
    committed: int,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Attend with ``part`` of the tokens, which follows ``committed`` slots; ``mask`` is of all."""
    batch, heads, tokens, _ = query.shape
    slots, group = committed + tokens, heads // key.shape[1]
    before = torch.full((batch,), committed, device="cpu")
    packed = vars(mask).setdefault(PACKED, {})  # the same for all layers of a forward
    if (committed, group) not in packed:
        packed[committed, group] = attention.pack_mask(mask[:, :, part, :slots], before, group)
    entries = key[:, :, :slots], value[:, :, :slots]
    return attention.attend(query, *entries, packed[committed, group], before, scale, cap or 0.0)

"""Modules of known forms in a model's code, compared with a kernel before it replaces them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skinny_kernels.shadow import stock_class

# Children of an attention layer that have the same inputs, in the order in which they are called.
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
# RoPE types whose angles depend on the position only, not on the sequence length.
GROWING_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
# Functions of a Python module of Transformers.
ROTARY, EAGER = "apply_rotary_pos_emb", "eager_attention_forward"
ADDED = (0.0, 1.0)  # to the weights of a norm
# Largest difference of a kernel from the model's own code, relative to the largest result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}


def linear_children(
    module: nn.Module, names: tuple[str, ...], kinds: tuple[type, ...] = (nn.Linear,)
) -> list[nn.Module]:
    """Return a module's linear layers of these names; none if one is missing or of another type."""
    layers = [layer for name in names if (layer := module._modules.get(name)) is not None]
    fits = len(layers) == len(names) and all(stock_class(layer) in kinds for layer in layers)
    return layers if fits else []


def epsilon(norm: nn.Module) -> Any:
    """Return the epsilon of an RMS norm; None if it has none."""
    known = norm.__dict__
    return known.get("variance_epsilon", known.get("eps"))


def sample(size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return two tokens; not random, because the caller's random numbers must not change."""
    return torch.linspace(-1, 2, 2 * size, device=device).sin().view(1, 2, size).to(dtype)


def is_same(found: Tensor, right: Any, dtype: torch.dtype | None = None) -> bool:
    """Return whether a kernel's result is that of the model's own code, up to rounding.

    ``dtype`` is that of the rounding, by default that of the results.
    """
    if not isinstance(right, Tensor) or right.shape != found.shape or right.dtype != found.dtype:
        return False
    off = (found.float() - right.float()).abs().max()
    return bool(off <= TOLERANCE[dtype or found.dtype] * right.float().abs().max())


def own_result(module: nn.Module, inputs: Tensor) -> Any:
    """Return what the class of ``module`` computes; None if it takes other arguments."""
    try:
        return stock_class(module).forward(module, inputs)
    except Exception:  # whatever unknown code raises
        return None


def added_to_weights(norm: nn.Module, rms_norm: Callable[..., Tensor]) -> float | None:
    """Return what an RMS norm adds to its weights; None if it computes anything else.

    Args:
        norm: a module.
        rms_norm: the kernel, called with inputs, weights, epsilon and what is added.
    """
    weight = norm._parameters.get("weight")
    norm_epsilon = epsilon(norm)
    if weight is None or weight.dim() != 1 or not isinstance(norm_epsilon, float):
        return None
    if len(list(norm.parameters())) != 1 or norm._modules:
        return None
    inputs = sample(weight.shape[0], weight.dtype, weight.device)
    right = own_result(norm, inputs)
    for added in ADDED:
        if is_same(rms_norm(inputs, weight, norm_epsilon, added), right):
            return added
    return None


def rotates(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether these have the shapes and strides that kernels for rotary embeddings take."""
    if query.dim() != 4 or key.dim() != 4:
        return False
    batch, _, tokens, size = query.shape
    return (
        key.shape[::2] == query.shape[::2]
        and key.shape[3] == size
        and cos.shape == sin.shape == (batch, tokens, size)
        and size % 2 == 0
        and query.stride(3) == key.stride(3) == cos.stride(2) == sin.stride(2) == 1
    )


def rotary_names(
    attention: nn.Module,
    call: Callable[..., Any],
    rotary: Callable[..., tuple[Tensor, ...]],
    known: dict[Any, Any],
    like: Tensor | None = None,
) -> dict[str, Any]:
    """Return the name by which an attention layer finds a kernel for rotary embeddings.

    Model code finds the function by its name in its own Python module (see ``replace_globals``).

    Args:
        attention: the layer, of a shadow.
        call: called with the module's own function and its arguments.
        rotary: the kernel, called with query, key, cosines and sines, for the comparison.
        known: results of comparisons by function.
        like: of the kernel's device and dtype; None: float32 on a CPU.

    Returns:
        Nothing if the kernel does not compute the same.
    """
    code = sys.modules.get(stock_class(attention).__module__)
    stock = getattr(code, ROTARY, None)
    if stock is None:
        return {}
    if stock not in known:
        # With the size of the model's heads, as a GPU's kernels are compiled for each size.
        size = getattr(attention, "head_dim", None) or 8
        like = torch.empty(0, dtype=torch.float32, device="cpu") if like is None else like
        known[stock] = _is_rotary(stock, rotary, size, like)
    return {ROTARY: partial(call, stock)} if known[stock] else {}


def _is_rotary(
    stock: Callable[..., Any],
    rotary: Callable[..., tuple[Tensor, ...]],
    size: int,
    like: Tensor,
) -> bool:
    """Return whether a kernel's results are those of a Python module's own function."""
    query, key = (
        sample(heads * size, like.dtype, like.device).view(1, 2, heads, size).transpose(1, 2)
        for heads in (4, 2)
    )
    angles = sample(size // 2, torch.float32, like.device)
    cos, sin = (
        torch.cat([half, half], dim=-1).to(like.dtype) for half in (angles.cos(), angles.sin())
    )
    try:
        right = stock(query, key, cos, sin)
    except Exception:  # whatever unknown code raises
        return False
    return isinstance(right, tuple) and all(map(is_same, rotary(query, key, cos, sin), right))

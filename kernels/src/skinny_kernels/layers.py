"""A model's layers on a CPU: linear layers, MLPs, norms, activations and rotary embeddings.

Models keep their own code: in a model's shadow, ``forward`` of modules of a known form is replaced
by one that calls the kernels for few tokens (see ``module_forms``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from skinny_kernels import attention, elementwise, linear
from skinny_kernels.angles import Angles
from skinny_kernels.compiled import as_bits
from skinny_kernels.known_forms import (
    EAGER,
    GROWING_ROPE,
    added_to_weights,
    epsilon,
    rotary_names,
    rotates,
)
from skinny_kernels.launch import this_thread
from skinny_kernels.modes import without_autocast
from skinny_kernels.module_forms import (
    LINEAR,
    activation_of,
    compared,
    gated_activation,
    gated_children,
    gated_weights,
    is_attention,
    is_layer_norm,
    is_plain,
    projections,
    weights_of,
)
from skinny_kernels.recordings import Recordings
from skinny_kernels.shadow import (
    replace_forward,
    replace_globals,
    replacement,
    stock_class,
)

ACTIVATION_CODE = "torch.nn.modules.activation", "transformers.activations"
MODELS = "transformers.models."  # whose code depends on the inputs alone
Attention = Callable[..., "tuple[Tensor, Tensor | None]"]


class _Shared(threading.local):
    """Outputs of projections that were computed together with the first one.

    Attributes:
        inputs: their inputs.
        outputs: by projection, those not yet returned.
    """

    inputs: Tensor | None = None
    outputs: dict[nn.Module, Tensor] = {}


_shared = _Shared()


def _is_ours(inputs: Tensor, max_tokens: float = linear.FEW_TOKENS) -> bool:
    """Return whether the kernels compute at most ``max_tokens`` tokens [..., q, size].

    How many rows a batch has does not matter, so that each is computed as it is alone.
    """
    tokens = inputs.shape[-2] if inputs.dim() > 1 else inputs.dim()
    return 0 < tokens <= max_tokens and inputs.numel() > 0 and _is_used(inputs)


def _is_used(inputs: Tensor) -> bool:
    """Return whether the kernels compute with this tensor now."""
    return is_plain(inputs) and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def _linear(
    layer: nn.Module, stock: Any, inputs: Tensor, max_tokens: float = linear.FEW_TOKENS
) -> Tensor:
    """``forward`` of a linear layer, for at most ``max_tokens`` tokens."""
    if _is_ours(inputs, max_tokens):
        weights = weights_of(layer, inputs.dtype)
        if weights is not None and inputs.shape[-1] == weights.inputs:
            return linear.products(inputs, (weights,))[0]
    unchanged: Tensor = stock(inputs)
    return unchanged


def _lm_head(layer: nn.Module, stock: Any, inputs: Tensor) -> Tensor:
    """``forward`` of the LM head.

    A prompt uses it for as many tokens as are learnt from; the bits of the last one must not depend
    on how many these are.
    """
    return _linear(layer, stock, inputs, inf)


def _first_projection(
    others: tuple[nn.Module, ...], layer: nn.Module, stock: Any, inputs: Tensor
) -> Tensor:
    """``forward`` of the first of several linear layers with the same inputs: multiplies all."""
    if _is_ours(inputs) and not any(map(_has_hooks, others)):
        layers = [weights_of(module, inputs.dtype) for module in (layer, *others)]
        if all(weights is not None and weights.inputs == inputs.shape[-1] for weights in layers):
            output, *rest = linear.products(inputs, layers)  # type: ignore[arg-type]
            _shared.inputs, _shared.outputs = inputs, dict(zip(others, rest))
            return output
    return _linear(layer, stock, inputs)


def _other_projection(layer: nn.Module, stock: Any, inputs: Tensor) -> Tensor:
    """``forward`` of the others: returns what was computed with the first."""
    if inputs is _shared.inputs:
        output = _shared.outputs.pop(layer, None)
        if output is not None:
            return output
    return _linear(layer, stock, inputs)


def _is_bare(layer: nn.Module) -> bool:
    """Return whether nobody sees the calls of this linear layer, so that they can be left out."""
    return stock_class(layer) in LINEAR and not _has_hooks(layer) and replacement(layer) is not None


def _mlp(activation: int, mlp: nn.Module, stock: Any, inputs: Tensor) -> Tensor:
    """``forward`` of ``down(activation(gate(x)) * up(x))``."""
    if _is_ours(inputs):
        layers = gated_children(mlp)
        found = gated_weights(layers, inputs.dtype) if all(map(_is_bare, layers)) else None
        if found is not None and found[0].inputs == inputs.shape[-1]:
            gate, up, down = found
            gated, _ = linear.products(inputs, (gate, up), gated=activation)
            return linear.products(gated, (down,))[0]
    unchanged: Tensor = stock(inputs)
    return unchanged


def _norm(added: float, norm: nn.Module, stock: Any, inputs: Tensor) -> Tensor:
    """``forward`` of an RMS norm."""
    weight = norm._parameters["weight"]
    if _are_normalised(inputs, weight):
        return elementwise.rms_norm(inputs, weight, epsilon(norm), added)  # type: ignore[arg-type]
    unchanged: Tensor = stock(inputs)
    return unchanged


def _layer_norm(zeros: Tensor, norm: nn.Module, stock: Any, inputs: Tensor) -> Tensor:
    """``forward`` of a layer norm; ``zeros`` are its bias if it has none."""
    weight: Any = norm._parameters["weight"]
    own: Any = norm._parameters.get("bias")
    bias = zeros if own is None else own
    if _are_normalised(inputs, weight) and _are_normalised(inputs, bias):
        return elementwise.layer_norm(inputs, weight, bias, epsilon(norm))
    unchanged: Tensor = stock(inputs)
    return unchanged


def _are_normalised(inputs: Tensor, weight: Tensor | None) -> bool:
    """Return whether the kernels normalise these inputs with these weights, or this bias."""
    return (
        _is_used(inputs)
        and inputs.numel() > 0
        and inputs.dim() <= 4
        and inputs.stride(-1) == 1
        and is_plain(weight)
        and weight is not None
        and weight.dtype == inputs.dtype
        and weight.shape == inputs.shape[-1:]
        and weight.is_contiguous()
    )


def _activation(activation: int, module: nn.Module, stock: Any, inputs: Tensor) -> Tensor:
    """``forward`` of an activation."""
    if _is_ours(inputs) and inputs.is_contiguous():
        return elementwise.activate(inputs, activation)
    unchanged: Tensor = stock(inputs)
    return unchanged


def _rotary(
    stock: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *a: Any, **k: Any
) -> Any:
    """``apply_rotary_pos_emb`` of a Python module of Transformers."""
    if len(cos) == len(sin) == 1:  # all rows have the same positions
        cos, sin = (table.expand(len(query), *table.shape[1:]) for table in (cos, sin))
    if not (a or k) and _is_used(query) and _rotates(query, key, cos, sin):
        return elementwise.rotary((query, key), cos, sin)
    return stock(query, key, cos, sin, *a, **k)


def _angles(module: nn.Module, stock: Any, like: Tensor, positions: Tensor, *others: Any) -> Any:
    """``forward`` of a rotary embedding: cosines and sines [B, n, size] of positions."""
    recorder = this_thread.recorder
    if recorder is None:
        return stock(like, positions, *others)
    with torch._C.DisableTorchFunction():
        empty, kinds = like.new_empty(0), getattr(module, "rope_type", None)
        found: Any = stock(like, positions, *others)
        frequencies = [as_bits(buffer) for buffer in module.buffers()]
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    by_position = GROWING_ROPE.issuperset(kinds)
    angles = Angles(lambda some: stock(empty, some, *others), by_position, frequencies)
    recorder.note_angles(angles, positions, found)
    return found


def _rotated(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Call the kernel."""
    query, key, cos, sin = inputs
    return elementwise.rotary((query, key), cos, sin)


def _rotates(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether the kernel takes these."""
    return (
        rotates(query, key, cos, sin)
        and query.shape[2] <= linear.FEW_TOKENS
        and is_plain(key)
        and cos.dtype == sin.dtype
        and cos.dtype in (query.dtype, torch.float32)
        and key.dtype == query.dtype
    )


def cover(shadow: nn.Module, attend: Attention) -> Recordings:
    """Let the layers of a model's shadow be computed by the kernels.

    Results are equal up to rounding, as between any two kernels.

    Args:
        shadow: see ``shadow.shadow_of``.
        attend: called with a Python module's own attention function, and with the arguments of
            that, in place of it; only where PyTorch has no attention of that form.

    Returns:
        What records its steps, empty so far.
    """
    known: dict[Any, Any] = {}  # results of comparisons by class, shapes and dtypes
    layers = [module for module in shadow.modules() if _is_decoder_layer(module)]
    if attention.is_available():
        with torch.inference_mode(), without_autocast(torch.device("cpu")):
            for module in shadow.modules():
                _cover(shadow, module, attend, known)
    known_layers = attention.is_available() and bool(layers) and all(map(_is_known, layers))
    return Recordings(shadow, known_layers)


def _cover(shadow: nn.Module, module: nn.Module, attend: Attention, known: dict[Any, Any]) -> None:
    cls = stock_class(module)
    if type(module) in LINEAR:
        head = getattr(shadow, "get_output_embeddings", lambda: None)()
        replace_forward(module, _lm_head if module is head else _linear)
    elif cls is nn.LayerNorm:
        if compared(module, known, is_layer_norm, [module]):
            weight: Any = module.weight
            replace_forward(module, _layer_norm, torch.zeros_like(weight))
    elif "Norm" in cls.__name__:
        added = compared(
            module, known, partial(added_to_weights, rms_norm=elementwise.rms_norm), [module]
        )
        if added is not None:
            replace_forward(module, _norm, added)
    elif layers := gated_children(module):
        if activation := compared(module, known, gated_activation, layers):
            replace_forward(module, _mlp, activation)
    elif layers := projections(module):
        first, *others = layers
        replace_forward(first, _first_projection, tuple(others))
        for other in others:
            replace_forward(other, _other_projection)
        names = rotary_names(module, _rotary, _rotated, known)
        replace_globals(module, names | _attention_names(module, attend, known))
    elif "RotaryEmbedding" in cls.__name__:
        replace_forward(module, _angles)
    elif cls.__module__ in ACTIVATION_CODE and (
        activation := activation_of(partial(cls.forward, module))
    ):
        replace_forward(module, _activation, activation)


def _attention_names(layer: nn.Module, attend: Attention, known: dict[Any, Any]) -> dict[str, Any]:
    """Return the name by which an attention layer finds the kernel, if PyTorch has none for it.

    That is so if scores are capped, as in Gemma 2. Nothing if the kernel does not compute the same.
    """
    stock = getattr(sys.modules.get(stock_class(layer).__module__), EAGER, None)
    cap = getattr(layer, "attn_logit_softcapping", None)
    if stock is None or not cap:
        return {}
    if (stock, cap) not in known:
        known[stock, cap] = is_attention(layer, stock, cap)
    return {EAGER: partial(attend, stock)} if known[stock, cap] else {}


def _is_decoder_layer(module: nn.Module) -> bool:
    return any(map(projections, module.children()))


def _is_known(layer: nn.Module) -> bool:
    """Return whether a decoder layer consists of modules of a known form, without hooks.

    Others may compute differently the next time: adapters, for example, can be switched off.
    """
    ours = (_linear, _first_projection, _other_projection, _mlp, _norm, _layer_norm)
    return not any(map(_has_hooks, layer.modules())) and all(
        replacement(module) in ours
        or bool(projections(module))
        or not (module._modules or module._parameters)
        or (not module._parameters and stock_class(module).__module__.startswith(MODELS))
        for module in layer.modules()
        if module is not layer
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)

"""Modules of known forms that the kernels compute on a CPU: their weights, and the comparisons.

All but linear layers are compared with the model's own code before they are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from skinny_kernels import activations, attention, elementwise, linear
from skinny_kernels.block_formats import ROWS
from skinny_kernels.known_forms import (
    GATED,
    PROJECTIONS,
    epsilon,
    is_same,
    linear_children,
    own_result,
    sample,
)
from skinny_kernels.packed import PackedLinear
from skinny_kernels.shadow import stock_class
from skinny_kernels.vectors import DTYPES

LINEAR = (nn.Linear, PackedLinear)
# Layers that are several in one, as in Phi-3.
MERGED_PROJECTIONS, MERGED_GATED = ("qkv_proj",), ("gate_up_proj", "down_proj")
FUNCTIONS = ("act_fn", "activation_fn")  # names of a gated MLP's activation
LARGE = 64  # times as large as usual
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    activations.SILU: functional.silu,
    activations.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    activations.GELU: functional.gelu,
}


def is_plain(tensor: Any) -> bool:
    """Return whether this is a dense tensor on a CPU of a dtype that the kernels read.

    Quantised weights are tensor subclasses with their own ``linear`` and are left alone.
    """
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.is_cpu
        and tensor.dtype in DTYPES
        and tensor.layout is torch.strided
    )


def weights_of(layer: nn.Module, dtype: torch.dtype) -> linear.Layer | None:
    """Return weight and bias of a linear layer if the kernel reads them for this dtype."""
    if isinstance(layer, PackedLinear):
        return layer.layer() if dtype == torch.float32 else None
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None or not is_plain(weight) or weight.dtype != dtype:
        return None
    if weight.stride(1) != 1 or not weight.shape[0]:
        return None
    if bias is not None and not (is_plain(bias) and bias.dtype == dtype and bias.stride(0) == 1):
        return None
    return linear.Layer(weight, bias)


def gated_children(mlp: nn.Module) -> list[nn.Module]:
    """Return gate, up and down projection of an MLP, of which the first two may be one layer."""
    return linear_children(mlp, GATED, LINEAR) or linear_children(mlp, MERGED_GATED, LINEAR)


def gated_weights(
    layers: Sequence[nn.Module], dtype: torch.dtype
) -> tuple[linear.Layer, linear.Layer, linear.Layer] | None:
    """Return gate, up and down projection if the kernel multiplies the first two together."""
    weights = [found for layer in layers if (found := weights_of(layer, dtype))]
    if not layers or len(weights) < len(layers):
        return None
    *first, down = weights
    gate, up = first if len(first) == 2 else _halves(first[0])
    same = gate.inputs == up.inputs and gate.outputs == up.outputs == down.inputs
    fills = gate.ggml_type is None or len(first) == 2 or gate.outputs % ROWS == 0
    return (gate, up, down) if same and fills and gate.ggml_type == up.ggml_type else None


def _halves(layer: linear.Layer) -> tuple[linear.Layer, linear.Layer]:
    """Return the first and the second half of a layer's outputs."""
    half = layer.outputs // 2
    rows = None if layer.block_rows is None else half
    biases = (None, None) if layer.bias is None else (layer.bias[:half], layer.bias[half:])
    weights = layer.weight[:half], layer.weight[half:]
    first, second = (
        linear.Layer(weight, bias, layer.ggml_type, rows) for weight, bias in zip(weights, biases)
    )
    return first, second


def projections(attention: nn.Module) -> list[nn.Module]:
    """Return the projections of an attention layer, which have the same inputs; or the one."""
    found = linear_children(attention, PROJECTIONS, LINEAR)
    return found or linear_children(attention, MERGED_PROJECTIONS, LINEAR)


def compared(
    module: nn.Module, known: dict[Any, Any], compare: Callable[..., Any], layers: list[Any]
) -> Any:
    """Return ``compare(module)``, called once for each class and shapes and dtypes of weights.

    None: its weights are not such that the kernels read them.
    """
    weights = [layer._parameters.get("weight") for layer in layers]
    if not all(
        (is_plain(weight) and weight.numel()) or isinstance(layer, PackedLinear)
        for layer, weight in zip(layers, weights)
    ):
        return None
    formats = [getattr(layer, "ggml_type", None) for layer in layers]
    shapes = ((weight.shape, weight.dtype) for weight in weights)
    key = stock_class(module), *shapes, *formats, *_settings(module)
    if key not in known:
        known[key] = compare(module)
    return known[key]


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """Return what else of a module its results may depend on: numbers, names and functions."""
    known = {**vars(module), **module._modules}
    return [
        (name, value if isinstance(value, (int, float, str)) else repr(value))
        for name, value in sorted(known.items())
        if (isinstance(value, (int, float, str)) and name != "layer_idx")
        or (name in FUNCTIONS and not getattr(value, "_parameters", None))
    ]


def is_layer_norm(norm: Any) -> bool:
    """Return whether the kernel computes the same as a layer norm."""
    if norm.weight.dim() != 1:
        return False
    bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    inputs = sample(norm.weight.shape[0], norm.weight.dtype)
    found = elementwise.layer_norm(inputs, norm.weight, bias, epsilon(norm))
    return is_same(found, own_result(norm, inputs))


def gated_activation(mlp: nn.Module) -> int | None:
    """Return the activation of a module that computes ``down(activation(gate(x)) * up(x))``."""
    layers = gated_children(mlp)
    dtypes: set[Any] = {layer._parameters["weight"].dtype for layer in layers}  # type: ignore[union-attr]
    dtype = torch.float32 if torch.uint8 in dtypes else dtypes.pop()
    found = gated_weights(layers, dtype)
    functions = (getattr(mlp, name, None) for name in FUNCTIONS)
    activation = next(filter(None, map(activation_of, functions)), None)
    if found is None or activation is None:
        return None
    gate, up, down = found
    for factor in (1, LARGE):  # some forms limit what is large
        inputs = factor * sample(gate.inputs, dtype)
        gated, _ = linear.products(inputs, (gate, up), gated=activation)
        output = linear.products(gated, (down,))[0]
        # Packed weights are multiplied by rounded inputs.
        right = own_result(mlp, inputs)
        if output.isfinite().all() and not is_same(
            output, right, torch.bfloat16 if down.ggml_type else dtype
        ):
            return None
    return activation


def activation_of(function: Any) -> int | None:
    """Return which activation a model's function computes; None: none of the kernel's."""
    numbers = torch.linspace(-9, 9, 999, dtype=torch.float32, device="cpu")
    try:
        found = function(numbers)
    except Exception:  # whatever unknown code raises
        return None
    return next((n for n, own in ACTIVATIONS.items() if is_same(own(numbers), found)), None)


def is_attention(layer: Any, stock: Callable[..., Any], cap: float) -> bool:
    """Return whether the kernel's results are those of a Python module's own attention function."""
    group = getattr(layer, "num_key_value_groups", 1)
    query, key, value = (
        sample(heads * 8, torch.float32).view(1, 2, heads, 8).transpose(1, 2)
        for heads in (2 * group, 2, 2)
    )
    mask = torch.zeros(1, 1, 2, 2, device="cpu")
    mask[..., 0, 1] = torch.finfo(torch.float32).min
    committed = torch.zeros(1, dtype=torch.long, device="cpu")
    scale = 4 * cap  # so that scores reach the limit
    try:
        right, *_ = stock(layer, query, key, value, mask, scaling=scale, softcap=cap)
    except Exception:  # whatever unknown code raises
        return False
    packed = attention.pack_mask(mask, committed, group)
    found = attention.attend(query, key, value, packed, committed, scale, cap)
    return is_same(found, right)

"""A model's layers on a CPU: linear layers, MLPs, norms, activations and rotary embeddings.

Models keep their own code: in a model's shadow, ``forward`` of modules of a known form is replaced
by one that calls the kernels for few tokens. All but linear layers are compared with the model's
own code before they are replaced.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from skinny_kernels import activations, attention, elementwise, linear
from skinny_kernels.angles import Angles
from skinny_kernels.block_formats import ROWS
from skinny_kernels.compiled import as_bits
from skinny_kernels.known_forms import (
    EAGER,
    GATED,
    GROWING_ROPE,
    PROJECTIONS,
    added_to_weights,
    epsilon,
    is_same,
    linear_children,
    own_result,
    rotary_names,
    rotates,
    sample,
)
from skinny_kernels.launch import recording
from skinny_kernels.modes import without_autocast
from skinny_kernels.packed import PackedLinear
from skinny_kernels.recordings import Recordings
from skinny_kernels.shadow import (
    replace_forward,
    replace_globals,
    replacement,
    stock_class,
)
from skinny_kernels.vectors import FORMS

LINEAR = (nn.Linear, PackedLinear)
# Layers that are several in one, as in Phi-3.
MERGED_PROJECTIONS, MERGED_GATED = ("qkv_proj",), ("gate_up_proj", "down_proj")
FUNCTIONS = ("act_fn", "activation_fn")  # names of a gated MLP's activation
ACTIVATION_CODE = "torch.nn.modules.activation", "transformers.activations"
LARGE = 64  # times as large as usual
MODELS = "transformers.models."  # whose code depends on the inputs alone
ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    activations.SILU: functional.silu,
    activations.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    activations.GELU: functional.gelu,
}


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


def _is_plain(tensor: Any) -> bool:
    """Return whether this is a dense tensor on a CPU of a dtype that the kernels read.

    Quantised weights are tensor subclasses with their own ``linear`` and are left alone.
    """
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.is_cpu
        and tensor.dtype in FORMS
        and tensor.layout is torch.strided
    )


def _weights(layer: nn.Module, dtype: torch.dtype) -> linear.Layer | None:
    """Return weight and bias of a linear layer if the kernel reads them for this dtype."""
    if isinstance(layer, PackedLinear):
        return layer.layer() if dtype == torch.float32 else None
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None or not _is_plain(weight) or weight.dtype != dtype:
        return None
    if weight.stride(1) != 1 or not weight.shape[0]:
        return None
    if bias is not None and not (_is_plain(bias) and bias.dtype == dtype and bias.stride(0) == 1):
        return None
    return linear.Layer(weight, bias)


def _is_ours(inputs: Tensor, max_tokens: float = linear.FEW_TOKENS) -> bool:
    """Return whether the kernels compute at most ``max_tokens`` tokens [..., q, size].

    How many rows a batch has does not matter, so that each is computed as it is alone.
    """
    tokens = inputs.shape[-2] if inputs.dim() > 1 else inputs.dim()
    return 0 < tokens <= max_tokens and inputs.numel() > 0 and _is_used(inputs)


def _is_used(inputs: Tensor) -> bool:
    """Return whether the kernels compute with this tensor now."""
    return (
        _is_plain(inputs) and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    )


def _linear(
    layer: nn.Module, stock: Any, inputs: Tensor, max_tokens: float = linear.FEW_TOKENS
) -> Tensor:
    """``forward`` of a linear layer, for at most ``max_tokens`` tokens."""
    if _is_ours(inputs, max_tokens):
        weights = _weights(layer, inputs.dtype)
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
        layers = [_weights(module, inputs.dtype) for module in (layer, *others)]
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
        layers = _gated_children(mlp)
        found = _gated_weights(layers, inputs.dtype) if all(map(_is_bare, layers)) else None
        if found is not None and found[0].inputs == inputs.shape[-1]:
            gate, up, down = found
            gated, _ = linear.products(inputs, (gate, up), gated=activation)
            return linear.products(gated, (down,))[0]
    unchanged: Tensor = stock(inputs)
    return unchanged


def _gated_children(mlp: nn.Module) -> list[nn.Module]:
    """Return gate, up and down projection of an MLP, of which the first two may be one layer."""
    return linear_children(mlp, GATED, LINEAR) or linear_children(mlp, MERGED_GATED, LINEAR)


def _gated_weights(
    layers: Sequence[nn.Module], dtype: torch.dtype
) -> tuple[linear.Layer, linear.Layer, linear.Layer] | None:
    """Return gate, up and down projection if the kernel multiplies the first two together."""
    weights = [found for layer in layers if (found := _weights(layer, dtype))]
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


def _projections(attention: nn.Module) -> list[nn.Module]:
    """Return the projections of an attention layer, which have the same inputs; or the one."""
    found = linear_children(attention, PROJECTIONS, LINEAR)
    return found or linear_children(attention, MERGED_PROJECTIONS, LINEAR)


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
        and _is_plain(weight)
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
    recorder = recording.recorder
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
        and _is_plain(key)
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
        The recordings of its steps.
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
        if _compared(module, known, _is_layer_norm, [module]):
            weight: Any = module.weight
            replace_forward(module, _layer_norm, torch.zeros_like(weight))
    elif "Norm" in cls.__name__:
        added = _compared(module, known, _added, [module])
        if added is not None:
            replace_forward(module, _norm, added)
    elif layers := _gated_children(module):
        if activation := _compared(module, known, _gated_activation, layers):
            replace_forward(module, _mlp, activation)
    elif layers := _projections(module):
        first, *others = layers
        replace_forward(first, _first_projection, tuple(others))
        for other in others:
            replace_forward(other, _other_projection)
        names = rotary_names(module, _rotary, _rotated, known)
        replace_globals(module, names | _attention_names(module, attend, known))
    elif "RotaryEmbedding" in cls.__name__:
        replace_forward(module, _angles)
    elif cls.__module__ in ACTIVATION_CODE and (
        activation := _activation_of(partial(cls.forward, module))
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
        known[stock, cap] = _is_attention(layer, stock, cap)
    return {EAGER: partial(attend, stock)} if known[stock, cap] else {}


def _is_attention(layer: Any, stock: Callable[..., Any], cap: float) -> bool:
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


def _is_decoder_layer(module: nn.Module) -> bool:
    return any(map(_projections, module.children()))


def _is_known(layer: nn.Module) -> bool:
    """Return whether a decoder layer consists of modules of a known form, without hooks.

    Others may compute differently the next time: adapters, for example, can be switched off.
    """
    ours = (_linear, _first_projection, _other_projection, _mlp, _norm, _layer_norm)
    return not any(map(_has_hooks, layer.modules())) and all(
        replacement(module) in ours
        or bool(_projections(module))
        or not (module._modules or module._parameters)
        or (not module._parameters and stock_class(module).__module__.startswith(MODELS))
        for module in layer.modules()
        if module is not layer
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _compared(
    module: nn.Module, known: dict[Any, Any], compare: Callable[..., Any], layers: list[Any]
) -> Any:
    """Return ``compare(module)``, called once for each class and shapes and dtypes of weights.

    None: its weights are not such that the kernels read them.
    """
    weights = [layer._parameters.get("weight") for layer in layers]
    if not all(
        (_is_plain(weight) and weight.numel()) or isinstance(layer, PackedLinear)
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


def _added(norm: nn.Module) -> float | None:
    """Return what an RMS norm adds to its weights; None if it is of another form."""
    return added_to_weights(norm, elementwise.rms_norm)


def _is_layer_norm(norm: Any) -> bool:
    """Return whether the kernel computes the same as a layer norm."""
    if norm.weight.dim() != 1:
        return False
    bias = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
    inputs = sample(norm.weight.shape[0], norm.weight.dtype)
    found = elementwise.layer_norm(inputs, norm.weight, bias, epsilon(norm))
    return is_same(found, own_result(norm, inputs))


def _gated_activation(mlp: nn.Module) -> int | None:
    """Return the activation of a module that computes ``down(activation(gate(x)) * up(x))``."""
    layers = _gated_children(mlp)
    dtypes: set[Any] = {layer._parameters["weight"].dtype for layer in layers}  # type: ignore[union-attr]
    dtype = torch.float32 if torch.uint8 in dtypes else dtypes.pop()
    found = _gated_weights(layers, dtype)
    functions = (getattr(mlp, name, None) for name in FUNCTIONS)
    activation = next(filter(None, map(_activation_of, functions)), None)
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


def _activation_of(function: Any) -> int | None:
    """Return which activation a model's function computes; None: none of the kernel's."""
    numbers = torch.linspace(-9, 9, 999, dtype=torch.float32, device="cpu")
    try:
        found = function(numbers)
    except Exception:  # whatever unknown code raises
        return None
    return next((n for n, own in ACTIVATIONS.items() if is_same(own(numbers), found)), None)

"""A model's layers on a GPU: RMS norms, gated MLPs and rotary embeddings, one kernel each.

As on a CPU (see ``skinny_kernels.layers``), models keep their own code: in a model's shadow,
``forward`` of modules of a known form is replaced by one that calls the kernels, if its result is
the same.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from skinny_kernels.errors import one_line
from skinny_kernels.gpu.adjacent import JointProduct
from skinny_kernels.gpu.residual import Sums, following_norms, layer_forward
from skinny_kernels.gpu.usable import is_ours, is_used
from skinny_kernels.known_forms import (
    GATED,
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
from skinny_kernels.modes import without_autocast
from skinny_kernels.shadow import BOUND, replace_forward, replace_globals, replacement

logger = logging.getLogger(__name__)
LARGEST_NORM = 16384  # numbers of one norm, which one program keeps in registers


def _kernels() -> Any:
    """Return the kernels' module, which imports Triton."""
    from skinny_kernels.gpu import elementwise_kernel

    return elementwise_kernel


def cover(shadow: nn.Module) -> None:
    """Let the layers of a model's shadow be computed by the kernels.

    Results are equal up to rounding, as between any two kernels.
    """
    device = next(shadow.parameters()).device
    known: dict[Any, Any] = {}  # results of comparisons by class, shapes and dtypes
    sums = Sums()
    try:
        with torch.inference_mode(), without_autocast(device):
            for module in shadow.modules():
                _cover(module, known, sums)
        for layer, following in following_norms(shadow):
            behind = layer._modules["post_attention_layernorm"]
            if (added := _added(behind)) is not None:
                more = _added(following)
                after = None if following is None or more is None else (following, more)
                replace_forward(layer, layer_forward, sums, added, after)
    except Exception as error:  # Triton's compiler may raise anything
        reason = one_line(error, 200)
        logger.warning("layers are computed by PyTorch: %s", reason)


def _cover(module: nn.Module, known: dict[Any, Any], sums: Sums) -> None:
    """Replace ``forward`` of a module of a known form; ``known``: results by class and shape."""
    weight = module._parameters.get("weight")
    if "Norm" in type(module).__name__ and weight is not None and is_ours(weight):
        key = type(module), weight.shape, weight.dtype
        if key not in known:
            fits = weight.numel() <= LARGEST_NORM
            known[key] = added_to_weights(module, _kernels().rms_norm) if fits else None
        if known[key] is not None:
            replace_forward(module, _norm, known[key], sums)
        return
    gated = linear_children(module, GATED)
    layers = gated or linear_children(module, PROJECTIONS)
    weight = layers[0]._parameters["weight"] if layers else None
    if weight is None or not is_ours(weight):
        return
    if gated:
        key = type(module), weight.shape, weight.dtype
        if key not in known:
            known[key] = _is_gated_mlp(module, weight)
        if known[key]:
            replace_forward(module, _mlp, JointProduct.of(gated[:2]))
    else:
        names = rotary_names(module, _rotary, _kernels().rotary, known, weight)
        replace_globals(module, names)
        product = JointProduct.of(layers)
        for number, layer in enumerate(layers if product is not None else ()):
            replace_forward(layer, _projection, product, number)


def _added(norm: nn.Module | None) -> float | None:
    """Return what is added to the weights of a norm that the kernel computes; None: it does not."""
    if norm is None or replacement(norm) is not _norm:
        return None
    added: float = norm.__dict__[BOUND][0]
    return added


def _norm(added: float, sums: Sums, norm: nn.Module, stock: Any, inputs: Tensor) -> Any:
    """``forward`` of an RMS norm."""
    if (known := sums.take(norm, inputs)) is not None:
        return known
    weight = norm._parameters["weight"]
    if weight is not None and is_used(inputs, weight):
        inputs = inputs.contiguous()  # heads and tokens may have changed places
        return _kernels().rms_norm(inputs, weight, epsilon(norm), added)
    return stock(inputs)


def _projection(
    product: JointProduct, number: int, layer: nn.Module, stock: Any, inputs: Tensor
) -> Any:
    """``forward`` of a linear layer whose weights are adjacent to those of others."""
    if is_used(inputs, layer._parameters["weight"]):
        return product.output(number, inputs)
    return stock(inputs)


def _mlp(joint: JointProduct | None, mlp: nn.Module, stock: Any, inputs: Tensor) -> Any:
    """``forward`` of ``down(silu(gate(x)) * up(x))``."""
    if is_used(inputs):
        gate, up, down = (mlp._modules[name] for name in GATED)
        if joint is None:
            gate_output, up_output = gate(inputs), up(inputs)  # type: ignore[misc]
        else:
            gate_output, up_output = joint.outputs(inputs)
        if gate_output.stride(-1) == up_output.stride(-1) == 1 and is_used(gate_output, up_output):
            return down(_kernels().gated(gate_output, up_output))  # type: ignore[misc]
    return stock(inputs)


def _is_gated_mlp(mlp: nn.Module, weight: Tensor) -> bool:
    """Return whether a module computes ``down(silu(gate(x)) * up(x))``."""
    inputs = sample(weight.shape[1], weight.dtype, weight.device)
    gate, up, down = linear_children(mlp, GATED)
    return is_same(down(_kernels().gated(gate(inputs), up(inputs))), own_result(mlp, inputs))


def _rotary(
    stock: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *a: Any, **k: Any
) -> Any:
    """``apply_rotary_pos_emb`` of a Python module of Transformers."""
    if not (a or k) and is_used(query, key, cos, sin) and rotates(query, key, cos, sin):
        return _kernels().rotary(query, key, cos, sin)
    return stock(query, key, cos, sin, *a, **k)

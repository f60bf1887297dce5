"""Residual sums computed together with the norm that follows, in a model's shadow.

A layer of Llama's form adds the output of its attention, and of its MLP, to its input, and the next
thing that is computed is a norm of that sum. So the two are one kernel, instead of a kernel that
reads and writes all numbers, and one that reads them again. The last sum of a layer is followed by
a norm of the next layer, or the model's last one, which finds its result here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from skinny_kernels.gpu.usable import is_used
from skinny_kernels.known_forms import epsilon, is_same

# Children of a layer ``x + attention(norm(x))``, then the same with the MLP.
CHILDREN = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
LAST_NORMS = ("norm", "final_layernorm", "ln_f")  # children of what has the layers


class Sums:
    """The sum that was computed last, and its norm, which a norm of that sum takes."""

    def __init__(self) -> None:
        """Begin without a sum."""
        self._total: Tensor | None = None
        self._normalised: Tensor | None = None
        self._norm: nn.Module | None = None
        self.same: dict[Any, bool] = {}  # by dtype and classes: whether layers are of this form

    def add(self, x: Tensor, residual: Tensor, norm: nn.Module, added: float) -> Tensor:
        """Return ``x + residual``, and keep its ``norm``, whose weights have ``added``."""
        from skinny_kernels.gpu import elementwise_kernel  # imports Triton

        weight = norm._parameters["weight"]
        assert weight is not None
        self._norm = norm
        self._total, self._normalised = elementwise_kernel.add_rms_norm(
            x.contiguous(), residual.contiguous(), weight, epsilon(norm), added
        )
        return self._total

    def take(self, norm: nn.Module, inputs: Tensor) -> Tensor | None:
        """Return what ``norm`` makes of ``inputs`` if that was computed with their sum."""
        if self._total is not inputs or self._norm is not norm:
            return None
        normalised, self._total, self._normalised, self._norm = self._normalised, None, None, None
        return normalised


def following_norms(shadow: nn.Module) -> list[tuple[nn.Module, nn.Module | None]]:
    """Return the layers of Llama's form, each with the norm that follows its last sum, if known."""
    found: list[tuple[nn.Module, nn.Module | None]] = []
    for parent in shadow.modules():
        for child in parent._modules.values():
            if isinstance(child, nn.ModuleList):
                layers = [layer for layer in child if set(layer._modules) == set(CHILDREN)]
                if not layers or len(layers) != len(child):
                    continue
                last = next((parent._modules[n] for n in LAST_NORMS if n in parent._modules), None)
                norms = [layer._modules["input_layernorm"] for layer in layers[1:]]
                found += zip(layers, [*norms, last])
    return found


def layer_forward(
    sums: Sums,
    added: float,
    following: tuple[nn.Module, float] | None,
    layer: nn.Module,
    stock: Any,
    hidden_states: Tensor,
    *positional: Any,
    **others: Any,
) -> Any:
    """``forward`` of a layer; at first compared with that of its class.

    Args:
        sums: of the model.
        added: to the weights of the norm behind the attention.
        following: the norm behind the layer, and what is added to its weights; None: not known.
        layer: the module.
        stock: its class's forward.
        hidden_states: [B, n, size].
        *positional: arguments that Llama's layers are called with by name.
        **others: of the attention.
    """
    if positional or not is_used(hidden_states):
        return stock(hidden_states, *positional, **others)
    kind = hidden_states.dtype, type(layer), *map(type, layer.children())
    if kind not in sums.same and not (
        hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        # Both write the same keys and values to the same slots.
        right = stock(hidden_states, **others)
        try:
            found = _compute(sums, added, following, layer, hidden_states, others)
            sums.same[kind] = is_same(found, right)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # its children take or return something else
            sums.same[kind] = False
        return right
    if not sums.same.get(kind, False):
        return stock(hidden_states, **others)
    return _compute(sums, added, following, layer, hidden_states, others)


def _compute(
    sums: Sums,
    added: float,
    following: tuple[nn.Module, float] | None,
    layer: nn.Module,
    hidden_states: Tensor,
    others: dict[str, Any],
) -> Tensor:
    norm, attention, behind, mlp = map(layer.get_submodule, CHILDREN)
    output, _ = attention(hidden_states=norm(hidden_states), **others)
    total = sums.add(output, hidden_states, behind, added)
    output = mlp(behind(total))
    if following is None:
        result: Tensor = total + output
        return result
    return sums.add(output, total, *following)

"""Weights of layers with the same inputs, one behind the other in memory: one product for all.

A GPU reads a large matrix faster than several small ones: on an H100 the products of queries, keys
and values of an 8B model reached 1.3 to 2.1 TB/s where its memory gives 3.0. Where such weights are
adjacent, they are one matrix, without a copy. Those of a model that we load are made so; a model
that was given to us is left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from skinny_kernels.known_forms import GATED, PROJECTIONS, linear_children


def groups(model: nn.Module) -> list[list[nn.Module]]:
    """Return the linear layers of a model that have the same inputs, group by group."""
    names = (PROJECTIONS, GATED[:2])
    found = [linear_children(module, some) for module in model.modules() for some in names]
    return [layers for layers in found if layers]


def move(model: nn.Module) -> None:
    """Move the weights of a model that nobody else has seen, so that those of a group are adjacent.

    Every parameter stays the same object with the same values. Groups with weights of several kinds
    or shared with others stay where they are, and so do all others if memory runs out.
    """
    uses = Counter(
        id(weight) for module in model.modules() for weight in module._parameters.values()
    )
    for layers in groups(model):
        for name in ("weight", "bias"):
            tensors = [layer._parameters[name] for layer in layers]
            if _is_movable(tensors) and all(uses[id(tensor)] == 1 for tensor in tensors):
                try:
                    together = torch.cat([tensor.data for tensor in tensors])
                except torch.OutOfMemoryError:
                    return
                begin = 0
                for tensor in tensors:
                    end = begin + len(tensor)
                    tensor.data = together[begin:end]
                    begin = end
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of the old places


def _is_movable(tensors: list[nn.Parameter | None]) -> TypeGuard[list[nn.Parameter]]:
    """Return whether tensors are plain ones of one kind, and not quantised ones, for example."""
    first = tensors[0]
    return first is not None and all(
        type(tensor) is nn.Parameter
        and type(tensor.data) is Tensor
        and (tensor.dtype, tensor.device, tensor.shape[1:])
        == (first.dtype, first.device, first.shape[1:])
        for tensor in tensors
    )


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return adjacent tensors [n, …] as one, without a copy; None if they are not adjacent."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        if (
            tensor.data_ptr() != end
            or not tensor.is_contiguous()
            or (tensor.dtype, tensor.shape[1:]) != (first.dtype, first.shape[1:])
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return None
        end += tensor.nbytes
    shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


class JointProduct:
    """One product for layers that are called one after the other with the same inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> None:
        """Multiply by the weights of all layers.

        Args:
            weight: [outputs of all layers, inputs].
            bias: [outputs of all layers], or None.
            sizes: outputs of each layer.
        """
        self._weight, self._bias, self._sizes = weight, bias, sizes
        self._inputs: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, layers: list[nn.Module]) -> JointProduct | None:
        """Return the product of some linear layers; None if their weights are not adjacent."""
        weights = [layer._parameters["weight"] for layer in layers]
        biases = [layer._parameters["bias"] for layer in layers]
        with_bias = [bias for bias in biases if bias is not None]
        weight = joined([weight for weight in weights if weight is not None])
        bias = joined(with_bias) if with_bias else None
        if weight is None or len(with_bias) not in (0, len(layers)) or (with_bias and bias is None):
            return None
        return cls(weight, bias, [len(weight) for weight in weights if weight is not None])

    def outputs(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of all layers, [..., size] each, as parts of one tensor."""
        return torch.split(linear(inputs, self._weight, self._bias), self._sizes, dim=-1)

    def output(self, number: int, inputs: Tensor) -> Tensor:
        """Return the outputs of a layer, computed with those of the first one."""
        if number == 0 or self._inputs is not inputs:
            self._inputs, self._outputs = inputs, self.outputs(inputs)
        output = self._outputs[number]
        if number == len(self._sizes) - 1:
            self._inputs, self._outputs = None, ()
        return output

"""Skinny GEMM: faster linear layers for few rows on a CPU.

With few rows, W x^T often takes half the time of x W^T, or twice, depending on the machine, the
shape and the number of rows; ``skinny_trial`` finds out which.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from token_recycling.model.override import Override, is_covered, replaceable
from token_recycling.model.skinny_trial import Shape, turned, turned_rows

# .tables: ``SkinnyGemm.table`` of each context that this thread has entered
_thread = threading.local()


def _is_plain(tensor: Tensor) -> bool:
    """Return whether this is a dense float32 tensor on a CPU.

    Quantised weights are tensor subclasses with their own ``linear`` and are left alone.
    """
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.is_cpu
        and tensor.dtype == torch.float32
        and tensor.layout == torch.strided
    )


def _gains(table: Mapping[Shape, frozenset[int]], inputs: Tensor, weight: Tensor) -> bool:
    """Return whether W x^T is to be used for these inputs and this weight."""
    if not (_is_plain(weight) and _is_plain(inputs)):
        return False
    rows = table.get(weight.shape)
    return (
        rows is not None
        and inputs.numel() // inputs.shape[-1] in rows
        and not torch.is_autocast_enabled("cpu")
    )


def _forward(stock: Any, inputs: Tensor) -> Tensor:
    """``forward`` of a linear layer: W x^T where it gains, in threads inside ``SkinnyGemm``."""
    tables = vars(_thread).get("tables")
    if tables and not torch.compiler.is_compiling():
        layer: nn.Linear = stock.__self__
        if _gains(tables[-1], inputs, layer.weight):
            return turned(inputs, layer.weight, layer.bias)
    found: Tensor = stock(inputs)
    return found


class SkinnyGemm:
    """Context manager that speeds up a model's linear layers in the current thread.

    Results are equal up to float32 rounding, as between any two kernels. The layers' ``forward``
    is replaced permanently; outside the context it calls the class's.

    Attributes:
        table: by shape of a weight, the numbers of rows at which W x^T is used.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replace ``forward`` of the linear layers of ``model`` (see ``prepare``)."""
        self.model = model
        self.prepare()

    def prepare(self) -> None:
        """Replace ``forward`` of layers not yet covered, and choose how they are computed.

        Layers are not covered e.g. in a copied model. Shapes that are new on this machine are
        measured, in two seconds at most. Call this before a prompt is read: the choice is fixed
        until the next call, and the same in all calls with the same number of threads.
        """
        weights: dict[Shape, list[Tensor]] = {}
        for layer in self.model.modules():
            if type(layer) is not nn.Linear:
                continue
            if replaceable(layer):
                layer.forward = Override(layer, "forward", _forward)  # type: ignore[method-assign]
            weight = layer.weight
            if is_covered(layer, "forward", _forward) and _is_plain(weight) and weight.numel():
                weights.setdefault(weight.shape, []).append(weight)
        self.table = turned_rows(weights)

    def __enter__(self) -> None:
        _thread.tables = (*getattr(_thread, "tables", ()), self.table)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _thread.tables = _thread.tables[:-1]

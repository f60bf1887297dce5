"""Skinny GEMM: faster linear layers for few rows on a CPU."""

from __future__ import annotations

import threading
from functools import lru_cache
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import linear

from token_recycling.model.override import Override, replaceable

# For 2 to 6 rows and a float32 weight, MKL takes twice as long as for one row to compute x W^T, but
# hardly longer to compute W x^T. With more rows only large weights gain.
# (maximum rows, minimum weight elements), measured on an EPYC with AVX2, 1 and 2 threads
GAINS = ((6, 0), (8, 2**19), (16, 2**22))
MOST_ROWS = GAINS[-1][0]
TRIAL = (4096, 1024)  # a weight larger than a core's cache
TRIAL_ROWS = 4
PAYS = 0.9  # largest ratio of times at which W x^T is used

_thread = threading.local()  # .entered: this thread's nesting depth inside ``SkinnyGemm``


def gains(rows: int, elements: int) -> bool:
    """Return whether W x^T is expected to be faster."""
    return rows > 1 and any(rows <= most and elements >= least for most, least in GAINS)


def turned(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear`` as (W x^T)^T plus the bias."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    product = torch.mm(weight, rows.T).T.contiguous()
    if bias is not None:
        product += bias
    return product.view(*inputs.shape[:-1], weight.shape[0])


def _fits(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether the inputs are few float32 rows on a CPU.

    Quantised weights are tensor subclasses with their own ``linear`` and are left alone.
    """
    return (
        type(inputs) is Tensor
        and type(weight) in (Tensor, Parameter)
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and gains(inputs.numel() // inputs.shape[-1], weight.numel())
        and not torch.is_autocast_enabled("cpu")
    )


def _forward(stock: Any, inputs: Tensor) -> Tensor:
    """``forward`` of a linear layer: W x^T in threads inside ``SkinnyGemm``."""
    if not torch.compiler.is_compiling() and vars(_thread).get("entered"):
        layer: nn.Linear = stock.__self__
        if _fits(inputs, layer.weight):
            return turned(inputs, layer.weight, layer.bias)
    found: Tensor = stock(inputs)
    return found


class SkinnyGemm:
    """Context manager that speeds up a model's linear layers in the current thread.

    Results are equal up to float32 rounding, as between any two kernels. The layers' ``forward``
    is replaced permanently; outside the context it calls the class's.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replace ``forward`` of the linear layers of ``model``."""
        self.model = model
        self.prepare()

    def prepare(self) -> None:
        """Replace ``forward`` of layers not yet covered, e.g. all layers of a copied model."""
        for layer in self.model.modules():
            if type(layer) is nn.Linear and replaceable(layer):
                layer.forward = Override(layer, "forward", _forward)  # type: ignore[method-assign]

    def __enter__(self) -> None:
        _thread.entered = getattr(_thread, "entered", 0) + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _thread.entered -= 1


def pays() -> bool:
    """Measure whether W x^T is faster on this machine, once per number of threads."""
    return _tried(torch.get_num_threads())


@lru_cache
def _tried(threads: int) -> bool:
    with torch.inference_mode():
        kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        weight, rows = torch.rand(TRIAL, **kind), torch.rand(TRIAL_ROWS, TRIAL[1], **kind)
        times: dict[Any, list[float]] = {linear: [], turned: []}
        for _ in range(7):
            for way, found in times.items():
                begin = perf_counter()
                way(rows, weight, None)
                found.append(perf_counter() - begin)
    return median(times[turned]) < PAYS * median(times[linear])

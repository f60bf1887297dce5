"""Products of a large weight with few rows, the faster way round on a CPU."""

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

# MKL multiplies 2 to 6 rows by a float32 weight in twice the time of one when asked for x W^T, and
# in hardly more when asked for W x^T. With more rows only large weights gain.
# (rows at most, weight elements at least), measured on an EPYC with AVX2, 1 and 2 threads
GAINS = ((6, 0), (8, 2**19), (16, 2**22))
MOST_ROWS = GAINS[-1][0]
TRIAL = (4096, 1024)  # a weight larger than a core's cache
TRIAL_ROWS = 4
PAYS = 0.9  # of the time at most, or it stays as it was

_thread = threading.local()  # .entered: how often this thread is inside ``SkinnyGemm``


def gains(rows: int, elements: int) -> bool:
    """True where W x^T is expected to be the faster one."""
    return rows > 1 and any(rows <= most and elements >= least for most, least in GAINS)


def turned(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear`` as (W x^T)^T."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    product = torch.mm(weight, rows.T).T.contiguous()
    if bias is not None:
        product += bias
    return product.view(*inputs.shape[:-1], weight.shape[0])


def _fits(inputs: Tensor, weight: Tensor) -> bool:
    """True for few float32 rows on a CPU.

    Quantised weights are subclasses with a ``linear`` of their own; they keep it.
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
    """``forward`` of a linear layer: the faster way round for a thread that asks for it."""
    if not torch.compiler.is_compiling() and vars(_thread).get("entered"):
        layer: nn.Linear = stock.__self__
        if _fits(inputs, layer.weight):
            return turned(inputs, layer.weight, layer.bias)
    found: Tensor = stock(inputs)
    return found


class SkinnyGemm:
    """While a thread has entered it, the linear layers of a model use the faster way round.

    The result is the same up to float32's rounding, as between any two kernels. The layers'
    ``forward`` is replaced once and for all; other threads and other callers get the class's.
    """

    def __init__(self, model: nn.Module) -> None:
        """Prepare the linear layers of ``model``."""
        self.model = model
        self.prepare()

    def prepare(self) -> None:
        """Prepare those layers that are new, as all of a copied model are."""
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
    """Try out whether W x^T is faster on this machine; once per number of threads."""
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

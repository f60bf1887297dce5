"""Products of a large weight with few rows, the faster way round on a CPU."""

from __future__ import annotations

import threading
from functools import lru_cache
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

# MKL multiplies 2 to 6 rows by a float32 weight in twice the time of one when asked for x W^T, and
# in hardly more when asked for W x^T. With more rows only large weights gain.
# (rows at most, weight elements at least), measured on an EPYC with AVX2, 1 and 2 threads
GAINS = ((6, 0), (8, 2**19), (16, 2**22))
MOST_ROWS = GAINS[-1][0]
TRIAL = (4096, 1024)  # a weight larger than a core's cache
TRIAL_ROWS = 4
PAYS = 0.9  # of the time at most, or it stays as it was

_linear = functional.linear


def gains(rows: int, elements: int) -> bool:
    """True where W x^T is expected to be the faster one."""
    return rows > 1 and any(rows <= most and elements >= least for most, least in GAINS)


def _turned(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``functional.linear``, for few float32 rows on a CPU as (W x^T)^T.

    Quantised weights are subclasses with a ``linear`` of their own; they keep it.
    """
    if (
        type(inputs) is Tensor
        and type(weight) in (Tensor, Parameter)
        and inputs.device.type == "cpu"
        and inputs.dtype == weight.dtype == torch.float32
        and weight.ndim == 2
        and gains(inputs.numel() // inputs.shape[-1], weight.numel())
    ):
        rows = inputs.reshape(-1, inputs.shape[-1])
        product = torch.mm(weight, rows.T).T.contiguous()
        if bias is not None:
            product += bias
        return product.view(*inputs.shape[:-1], weight.shape[0])
    return _linear(inputs, weight, bias)


class NarrowProducts:
    """While entered, linear layers use the faster way round; for all threads of the process.

    The result is the same up to float32's rounding, as between any two kernels.
    """

    _lock = threading.Lock()
    _entered = 0

    def __enter__(self) -> None:
        with self._lock:
            NarrowProducts._entered += 1
            functional.linear = _turned  # type: ignore[assignment]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            NarrowProducts._entered -= 1
            if not NarrowProducts._entered:
                functional.linear = _linear


def pays() -> bool:
    """Try out whether W x^T is faster on this machine; once per number of threads."""
    return _tried(torch.get_num_threads())


@lru_cache
def _tried(threads: int) -> bool:
    with torch.inference_mode():
        weight, rows = torch.rand(TRIAL), torch.rand(TRIAL_ROWS, TRIAL[1])
        times: dict[Any, list[float]] = {_linear: [], _turned: []}
        for _ in range(7):
            for way, found in times.items():
                begin = perf_counter()
                way(rows, weight)
                found.append(perf_counter() - begin)
    return median(times[_turned]) < PAYS * median(times[_linear])

"""Linear layers for few rows on a CPU.

PyTorch's kernels are made for one row or for hundreds. ``linear_kernel`` is made for 1 to 128, so
that verifying a tree of 16 tokens costs about as much as decoding one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import linear

from token_recycling.model.cpu import linear_kernel
from token_recycling.model.cpu.threads import openmp
from token_recycling.model.cpu.vectors import FORMS, processor
from token_recycling.model.override import Override, is_covered, replaceable
from token_recycling.util.modes import ThreadContext, without_autocast

MOST_ROWS = 128
# The trial of kernel and PyTorch: numbers of rows, seconds in all, and the ratio of their times
# below which the kernel is used.
TRIAL_ROWS = (1, 2, 4, 16, 64, MOST_ROWS)
TRIAL_SECONDS = 0.2
CLEAR = 0.97
# Bytes of weights that are multiplied in the trial; with many rows, where arithmetic takes longer
# than reading: the number of rows times the bytes of an element.
SAMPLE, ARITHMETIC = 2**26, 2**30


@lru_cache
def _kernel(dtype: torch.dtype) -> Any:
    """Return the kernel for a dtype of weights, compiled at the first call."""
    return linear_kernel.compile_kernel(FORMS[dtype])


@lru_cache
def _reads(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of inputs that the kernel for a dtype of weights reads."""
    return dtype if processor().dots(FORMS[dtype]) else torch.float32


Fields = ctypes.c_int64 * linear_kernel.FIELDS


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` with the kernel.

    Args:
        inputs: [..., in_features] of the weight's dtype, not empty.
        weight: [out_features, in_features] on the CPU, of a dtype in ``FORMS``, whose rows are
            contiguous.
        bias: [out_features] or None.

    Returns:
        [..., out_features]; sums are accumulated in float32.
    """
    dtype, (outputs, size) = weight.dtype, weight.shape
    # Named, so that copies live until the kernel has read them.
    x = inputs.to(_reads(dtype)).contiguous()
    added = None if bias is None else bias.float().contiguous()
    found = weight.new_empty(*inputs.shape[:-1], outputs)
    fields = Fields(
        x.data_ptr(),
        weight.data_ptr(),
        found.data_ptr(),
        0 if added is None else added.data_ptr(),
        x.numel() // size,
        outputs,
        size,
        size * x.itemsize,
        weight.stride(0) * weight.itemsize,
        0,
    )
    parallel = openmp()
    assert parallel is not None
    parallel(_kernel(dtype).address, fields, torch.get_num_threads(), 0)
    return found


@torch.library.custom_op("token_recycling::linear", mutates_args=())
def _opaque_product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """For compiled steps, which cannot look into the kernel."""
    return product(inputs, weight, bias)


@_opaque_product.register_fake
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], weight.shape[0])


def _is_plain(tensor: Tensor) -> bool:
    """Return whether this is a dense tensor on a CPU of a dtype that the kernel reads.

    Quantised weights are tensor subclasses with their own ``linear`` and are left alone.
    """
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.is_cpu
        and tensor.dtype in FORMS
        and tensor.layout == torch.strided
    )


def _is_in(used: range | None, rows: int) -> bool:
    # Not ``rows in used``, which cannot be compiled for sizes that vary.
    return used is not None and used.start <= rows < used.stop


def _fits(layer: nn.Linear, inputs: Tensor, used: Mapping[torch.dtype, range]) -> bool:
    """Return whether the kernel is to be used for this layer and these inputs."""
    weight, bias = layer.weight, layer.bias
    return (
        _is_plain(weight)
        and _is_plain(inputs)
        and inputs.dtype == weight.dtype
        and inputs.shape[-1:] == weight.shape[1:]
        and _is_in(used.get(weight.dtype), inputs.numel() // max(1, inputs.shape[-1]))
        and weight.stride(-1) == 1
        and (bias is None or (_is_plain(bias) and bias.dtype == weight.dtype))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def _forward(layer: nn.Linear, stock: Any, inputs: Tensor) -> Tensor:
    """``forward`` of a linear layer: the kernel where it is faster, inside ``CpuLinear``."""
    entered = CpuLinear.entered.objects
    if not (entered and _fits(layer, inputs, entered[-1].rows)):
        unchanged: Tensor = stock(inputs)
        return unchanged
    opaque = torch.compiler.is_compiling()
    way = torch.ops.token_recycling.linear if opaque else product
    found: Tensor = way(inputs, layer.weight, layer.bias)
    return found


class CpuLinear(ThreadContext):
    """Context manager that speeds up a model's linear layers in the current thread.

    Results are equal up to rounding, as between any two kernels. The layers' ``forward`` is
    replaced permanently; outside the context it calls the class's.

    Attributes:
        rows: by dtype of a weight, the numbers of rows for which the kernel is used.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replace ``forward`` of the linear layers of ``model`` (see ``prepare``)."""
        self.model = model
        self.prepare()

    def prepare(self) -> None:
        """Replace ``forward`` of layers not yet covered, e.g. in a copied model.

        The kernel is tried on the first model of its shapes, in about ``TRIAL_SECONDS``. The
        result holds for the process and the number of threads.
        """
        weights: dict[torch.dtype, list[Tensor]] = {}
        for layer in self.model.modules():
            if type(layer) is not nn.Linear:
                continue
            if replaceable(layer):
                layer.forward = Override(layer, "forward", _forward)  # type: ignore[method-assign]
            weight = layer.weight
            covered = is_covered(layer, "forward", _forward) and _is_plain(weight)
            if covered and weight.numel() and weight.stride(-1) == 1:
                weights.setdefault(weight.dtype, []).append(weight)
        self.rows = {dtype: _rows(dtype, found) for dtype, found in weights.items()}


_lock = threading.Lock()
# (dtype, threads, shapes of the sample) -> rows for which the kernel is used. An entry never
# changes, so that a process computes the same numbers in every step.
_settled: dict[tuple[Any, ...], range] = {}


def _rows(dtype: torch.dtype, weights: Sequence[Tensor]) -> range:
    """Return the numbers of rows for which the kernel is used."""
    if openmp() is None or not processor().lanes:
        return range(0)
    sample = _sample(weights, SAMPLE)
    key = dtype, torch.get_num_threads(), *(weight.shape for weight in sample)
    with _lock:
        if key not in _settled:
            _settled[key] = _trial(sample)
        return _settled[key]


def _trial(sample: Sequence[Tensor]) -> range:
    """Measure the kernel against PyTorch; return the numbers of rows for which it is faster.

    Both multiply the same weights in turn, more than the processor's caches hold, as in a forward.
    """
    _kernel(sample[0].dtype)  # compiles it, which the trial should not count
    end = perf_counter() + TRIAL_SECONDS
    used = range(0)
    with torch.inference_mode(), without_autocast(torch.device("cpu")):
        for i, rows in enumerate(TRIAL_ROWS):
            share = (end - perf_counter()) / (len(TRIAL_ROWS) - i)
            fewer = _sample(sample, min(SAMPLE, ARITHMETIC // rows))
            if _ratio(fewer, rows, perf_counter() + share) < CLEAR:
                used = range(used.start or rows, rows + 1)
            elif used:
                break
    return used


def _sample(weights: Sequence[Tensor], most: int) -> list[Tensor]:
    """Return weights of at most ``most`` bytes together; a larger one is cut."""
    found, left = [], most
    for weight in weights:
        row = weight.shape[1] * weight.element_size()
        piece = weight[: max(1, min(weight.shape[0], left // row))]
        found.append(piece)
        left -= piece.shape[0] * row
        if left <= 0:
            break
    return found


def _ratio(weights: Sequence[Tensor], rows: int, end: float) -> float:
    """Return the kernel's time relative to PyTorch's for inputs of this many rows.

    Args:
        weights: multiplied in turn.
        rows: of the inputs.
        end: ``perf_counter`` time in seconds at which to stop; two to five rounds are measured.
    """
    dtype = weights[0].dtype
    # Not random: the caller's random numbers must not change.
    inputs = {w.shape[1]: torch.linspace(-1, 1, rows * w.shape[1]) for w in weights}
    inputs = {size: x.view(rows, size).to(dtype) for size, x in inputs.items()}
    times: dict[Any, list[float]] = {linear: [], product: []}
    while (rounds := len(times[product])) < 2 or (rounds < 5 and perf_counter() < end):
        for way, found in times.items():
            before = perf_counter()
            for weight in weights:
                way(inputs[weight.shape[1]], weight)
            found.append(perf_counter() - before)
    return min(times[product]) / min(times[linear])

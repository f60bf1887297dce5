"""Which of two ways to compute a linear layer is faster, measured once per machine.

The ratio of their times depends on the processor, the number of threads, the shape of the weight
and the number of rows, and not monotonically on any of them. So it is measured for the shapes that
a model has, and kept in a file in the cache folder.
"""

from __future__ import annotations

import json
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from token_recycling.errors import TokenRecyclingError
from token_recycling.files import cache_folder, write_text
from token_recycling.machine import instructions, processor
from token_recycling.modes import without_autocast

Shape = tuple[int, ...]  # of a weight: (out_features, in_features)
Ratios = dict[int, float]  # rows -> time of ``turned`` relative to ``linear``

# Measured. Sizes that ``AutoSize`` verifies, 6 as the last before a larger kernel with AVX2, and
# 15 as the last before one with AVX-512.
ROWS = (2, 4, 6, 8, 12, 15, 16, 24, 32, 48)
MOST_ROWS = ROWS[-1]
CLEAR = 0.93  # ratio below which ``turned`` is used
ROUNDS = 7
LEAST_ROUNDS = 3
LONG = 0.003  # seconds; ``LEAST_ROUNDS`` suffice if no product took less
PIECE = 2**23  # larger weights are measured in pieces of this many elements
# Seconds that a process may spend on a model: least, per element of its different shapes, most.
BUDGET = (0.3, 1e-7, 2.0)

_lock = threading.Lock()
# threads -> shape -> rows at which ``turned`` is used. An entry never changes, so that a process
# computes the same numbers in every step.
_settled: dict[int, dict[Shape, frozenset[int]]] = {}


def turned(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``linear`` as (W x^T)^T plus the bias.

    Args:
        inputs: [..., in_features].
        weight: [out_features, in_features] of the same dtype.
        bias: [out_features], or None.

    Returns:
        [..., out_features], contiguous.
    """
    rows = inputs.reshape(-1, inputs.shape[-1])
    product = torch.mm(weight, rows.T).T.contiguous()
    if bias is not None:
        product += bias
    return product.view(*inputs.shape[:-1], weight.shape[0])


def turned_rows(weights: Mapping[Shape, Sequence[Tensor]]) -> dict[Shape, frozenset[int]]:
    """Return the numbers of rows, 2 to ``MOST_ROWS``, at which ``turned`` is used, by shape.

    Shapes that neither this process nor the file knows are measured, within ``BUDGET``. What does
    not fit into it stays ``linear`` in this process; the next process measures it.

    Args:
        weights: the float32 CPU weights of each shape, at least one; they are only read.
    """
    threads = torch.get_num_threads()
    with _lock:
        settled = _settled.setdefault(threads, {})
        new = {shape: weights[shape] for shape in weights if shape not in settled}
        if new:
            machine = _machine(threads)
            known = _load().get(machine, {})
            found = _measure(new, known)
            if found:
                _save(machine, found)
            for shape in new:
                settled[shape] = winning_rows(known.get(shape, {}) | found.get(shape, {}))
        return {shape: settled[shape] for shape in weights}


def winning_rows(ratios: Ratios) -> frozenset[int]:
    """Return the numbers of rows at which ``turned`` is used, given its measured ratios.

    A number between two of ``ROWS`` needs both to be measured and to win, because kernels change
    at numbers of rows that differ between processors.
    """

    def wins(rows: int) -> bool:
        nearest = ROWS[bisect_right(ROWS, rows) - 1], ROWS[bisect_left(ROWS, rows)]
        return all(ratios.get(measured, math.inf) < CLEAR for measured in nearest)

    return frozenset(filter(wins, range(ROWS[0], MOST_ROWS + 1)))


def measured_ratio(weights: Sequence[Tensor], rows: int, end: float) -> float | None:
    """Measure the time of ``turned`` relative to ``linear``.

    The two ways alternate, and each product reads the next of ``weights``, as in a forward, where
    a layer's weight has left the core's cache since the last step. Both the medians and the
    shortest times are compared, and the larger ratio is returned: a busy machine disturbs either
    by itself, and a wrong decision for ``turned`` would cost more than a missed gain.

    Args:
        weights: float32 [out_features, in_features] each.
        rows: number of rows of the random inputs.
        end: ``perf_counter`` time in seconds at which to give up.

    Returns:
        The ratio, or None if there was no time for ``LEAST_ROUNDS``.
    """
    # A generator of its own: the caller's random numbers must not change.
    generator = torch.Generator("cpu").manual_seed(rows)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "generator": generator}
    inputs, following = torch.rand(rows, weights[0].shape[1], **kind), cycle(weights)
    times: dict[Any, list[float]] = {linear: [], turned: []}
    now = perf_counter()
    for done in range(ROUNDS):
        if done >= LEAST_ROUNDS and min(map(min, times.values())) > LONG:
            break
        for way, found in times.items():
            if now >= end:
                return None
            before, weight = now, next(following)
            way(inputs, weight, None)
            now = perf_counter()
            found.append(now - before)
    return max(average(times[turned]) / average(times[linear]) for average in (median, min))


def _measure(
    weights: Mapping[Shape, Sequence[Tensor]], known: Mapping[Shape, Ratios]
) -> dict[Shape, Ratios]:
    """Measure the ratios that are not ``known``, small shapes first, until the time is used up."""
    least, per_element, most = BUDGET
    end = perf_counter() + min(most, least + per_element * sum(map(math.prod, weights)))
    found: dict[Shape, Ratios] = {}
    with torch.inference_mode(), without_autocast(torch.device("cpu")):
        for shape in sorted(weights, key=math.prod):
            pieces = list(_pieces(weights[shape]))
            for rows in ROWS:
                if rows in known.get(shape, {}):
                    continue
                ratio = measured_ratio(pieces, rows, end)
                if ratio is None:
                    return found
                found.setdefault(shape, {})[rows] = round(ratio, 3)
    return found


def _pieces(weights: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the weights, or parts of them of at most ``PIECE`` elements and equal shape."""
    for weight in weights:
        height = max(1, min(weight.shape[0], PIECE // weight.shape[1]))
        yield from (part for part in torch.split(weight, height) if part.shape[0] == height)


def _machine(threads: int) -> str:
    """Return what the times depend on besides the shapes."""
    capability = torch.backends.cpu.get_cpu_capability()
    kind = " ".join((processor(), *instructions(), capability))
    return f"{kind}, {threads} threads, torch {torch.__version__}"


def _path() -> Path:
    return cache_folder() / "skinny-gemm-1.json"


def _load() -> dict[str, dict[Shape, Ratios]]:
    """Return the ratios in the file by machine and shape; none if it is missing or broken."""
    try:
        data = json.loads(_path().read_text(encoding="utf-8"))
        return {
            machine: {_shape(name): _ratios(ratios) for name, ratios in shapes.items()}
            for machine, shapes in data.items()
        }
    # All that malformed JSON can raise; RuntimeError: no home folder, or deeply nested lists.
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError):
        return {}


def _shape(name: str) -> Shape:
    return tuple(map(int, name.split("x")))


def _ratios(data: Mapping[str, Any]) -> Ratios:
    ratios = {int(rows): float(ratio) for rows, ratio in data.items()}
    if not all(0 < ratio < math.inf for ratio in ratios.values()):
        raise ValueError("not ratios of times")
    return ratios


def _save(machine: str, found: Mapping[Shape, Ratios]) -> None:
    """Add ratios to the file if it can be written."""
    data = _load()  # again: another process may have written meanwhile
    shapes = data.setdefault(machine, {})
    for shape, ratios in found.items():
        shapes[shape] = shapes.get(shape, {}) | ratios
    named = {
        name: {"x".join(map(str, shape)): ratios for shape, ratios in shapes.items()}
        for name, shapes in data.items()
    }
    with suppress(OSError, TokenRecyclingError, RuntimeError):  # RuntimeError: no home folder
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(named, indent=1) + "\n")

"""Prediction of a serving engine's speed with and without drafts, by the number of requests.

A step of R requests that each verify n nodes below their root takes ``seconds(R, n)`` and emits
R (1 + a_1 + … + a_n) tokens, where a_i is the probability that node i is accepted. The model leaves
out prompts, waiting, and that a request with better drafts gets more nodes than another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

StepSeconds = Callable[[int, int], float]  # of R requests and n nodes each


@dataclass(frozen=True)
class Prediction:
    """The best number of nodes for a number of requests, and what it brings.

    Attributes:
        requests: served at once.
        nodes: of each draft, root not included; 0: plain decoding is faster.
        tokens_per_second: of all requests.
        tpot: seconds per token of a request.
        plain: tokens per second without drafts.
    """

    requests: int
    nodes: int
    tokens_per_second: float
    tpot: float
    plain: float


def predict(seconds: StepSeconds, acceptance: Sequence[float], requests: int) -> Prediction:
    """Choose the number of nodes that gives the most tokens per second.

    Args:
        seconds: of a step.
        acceptance: probability of each node below the root, in the order of drafting.
        requests: served at once.
    """
    emitted = 1 + np.concatenate([[0.0], np.cumsum(acceptance)])
    rates = [requests * float(t) / seconds(requests, n) for n, t in enumerate(emitted)]
    best = int(np.argmax(rates))
    return Prediction(requests, best, rates[best], requests / rates[best], rates[0])


class MeasuredSteps:
    """Step times fitted to those that ``bench-serving`` has measured.

    A plain step takes a + b R, one with drafts c + d R + e n R more.
    """

    def __init__(self, passes: Sequence[dict[str, Any]]) -> None:
        """Fit the five numbers by least squares of the relative errors.

        Args:
            passes: as ``bench-serving --out`` writes them, some with drafts.
        """
        rows, seconds, weights = [], [], []
        for one in passes:
            for requests, tokens, count, taken in one["costs"]:
                nodes = tokens - requests
                drafted = float(nodes > 0)
                rows.append([1.0, requests, drafted, drafted * requests, nodes])
                seconds.append(taken)
                weights.append(np.sqrt(count) / taken)
        scale = np.array(weights)
        table = np.array(rows) * scale[:, None]
        self.fitted = np.linalg.lstsq(table, np.array(seconds) * scale, rcond=None)[0]

    def __call__(self, requests: int, nodes: int) -> float:
        """Return the seconds of a step of ``requests`` with ``nodes`` each below the root."""
        drafted = float(nodes > 0)
        return float(self.fitted @ [1.0, requests, drafted, drafted * requests, nodes * requests])


@dataclass(frozen=True)
class RooflineSteps:
    """Step times of a GPU from its data sheet and the shape of a model.

    Weights and caches are read once per step; arithmetic and reading overlap.

    Attributes:
        bandwidth: bytes per second that a step reaches.
        arithmetic: operations per second that it reaches.
        parameters: of the model.
        bytes_per_parameter: of its weights.
        cache_bytes: of one token of one request, over all layers.
        context: tokens of each request.
        host: seconds between two forwards.
        drafting: seconds that drafting adds to a step.
        drafting_per_request: seconds that it adds per request.
    """

    bandwidth: float
    arithmetic: float
    parameters: float
    bytes_per_parameter: float
    cache_bytes: float
    context: int
    host: float
    drafting: float
    drafting_per_request: float

    def __call__(self, requests: int, nodes: int) -> float:
        """Return the seconds of a step of ``requests`` with ``nodes`` each below the root."""
        read = self.parameters * self.bytes_per_parameter
        read += requests * self.context * self.cache_bytes
        operations = 2 * self.parameters * requests * (1 + nodes)
        seconds = self.host + max(read / self.bandwidth, operations / self.arithmetic)
        if nodes:
            seconds += self.drafting + requests * self.drafting_per_request
        return seconds

    @property
    def free_tokens(self) -> float:
        """Tokens per step up to which reading the weights takes longer than the arithmetic."""
        return self.arithmetic * self.bytes_per_parameter / (2 * self.bandwidth)


def acceptance(passes: Sequence[dict[str, Any]]) -> list[float]:
    """Return how often each drafted node was accepted, by its position in the draft.

    Args:
        passes: with drafts, all of one length.
    """
    drafts = sum(one["drafts"] for one in passes)
    positions = zip(*(one["accepted_at"] for one in passes), strict=True)
    return [sum(position) / drafts for position in positions]

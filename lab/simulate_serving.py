"""Predicts an engine's speed by the number of requests, and checks it against measurements.

python lab/simulate_serving.py --steps STEPS.json … --acceptance FIXED.json --check CHECK.json

The files are those of ``lab/bench_serving.py --out``: STEPS with plain steps and chains
of several fixed lengths (``--options '{"automatic": "false"}'``), FIXED with the longest of these,
and CHECK with the plug-in's own choice, at other numbers of requests. The tables for GPUs come from
data sheets, not from measurements.

A step of R requests that each verify n nodes below their root takes ``seconds(R, n)`` and emits
R (1 + a_1 + … + a_n) tokens, where a_i is the probability that node i is accepted. The model leaves
out prompts, waiting, and that a request with better drafts gets more nodes than another.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from token_recycling.util.files import write_text

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# A published sweep of vLLM reached 77 % of an A100's bandwidth with one request
# (johnmusgrave.com/p/vllm-throughput-latency-sweep-on); the share of the arithmetic is assumed.
BANDWIDTH_SHARE, ARITHMETIC_SHARE = 0.77, 0.6
GPUS = {
    "H100 SXM": (3.35e12, 989e12),
    "H200 SXM": (4.8e12, 989e12),
}  # bytes/s, bfloat16 operations/s
LLAMA_8B = {
    "parameters": 8.03e9,
    "bytes_per_parameter": 2.0,
    "cache_bytes": 2 * 32 * 8 * 128 * 2.0,  # keys and values, layers, heads, dimensions, bytes
    "context": 1024,
}
HOST = 1.0e-3  # seconds between two forwards; that of vLLM's older runner, assumed
# Seconds that drafting adds, from the times between forwards measured here on a CPU
DRAFTING, DRAFTING_PER_REQUEST = 0.5e-3, 0.1e-3

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
    """Step times fitted to those that ``lab/bench_serving.py`` has measured.

    A plain step takes a + b R, one with drafts c + d R + e n R more.
    """

    def __init__(self, passes: Sequence[dict[str, Any]]) -> None:
        """Fit the five numbers by least squares of the relative errors.

        Args:
            passes: as ``lab/bench_serving.py --out`` writes them, some with drafts.
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


def passes_of(path: Path, mode: str) -> list[dict[str, Any]]:
    """Return all passes of a mode."""
    lives = json.loads(path.read_text(encoding="utf-8"))["passes"].get(mode, [])
    return [one for life in lives for one in life]


def row(found: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON types."""
    return {**vars(found), "speedup": found.tokens_per_second / found.plain}


def check(steps: MeasuredSteps, accepted: Sequence[float], path: Path) -> list[dict[str, Any]]:
    """Compare predictions with measurements of the plug-in's own choice."""
    measured = json.loads(path.read_text(encoding="utf-8"))["rows"]
    found = []
    for one in measured:
        if one["mode"] not in ("plain", "chain"):
            continue
        prediction = predict(steps, accepted, one["concurrency"])
        plain = one["concurrency"] / prediction.plain
        tpot = plain if one["mode"] == "plain" else prediction.tpot
        found.append(
            {
                "mode": one["mode"],
                "requests": one["concurrency"],
                "tpot": tpot,
                "measured_tpot": one["tpot"],
                "error": tpot / one["tpot"] - 1,
                "tokens_per_second": one["concurrency"] / tpot,
                "measured_tokens_per_second": one["tokens_per_second"],
            }
        )
    return found


def gpu(name: str) -> RooflineSteps:
    """Return the step times of a GPU with an 8B model in bfloat16."""
    bandwidth, arithmetic = GPUS[name]
    return RooflineSteps(
        bandwidth=BANDWIDTH_SHARE * bandwidth,
        arithmetic=ARITHMETIC_SHARE * arithmetic,
        **LLAMA_8B,
        host=HOST,
        drafting=DRAFTING,
        drafting_per_request=DRAFTING_PER_REQUEST,
    )


def main() -> None:
    """Predict, check, print, and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", nargs="+", type=Path, required=True)
    parser.add_argument("--acceptance", type=Path, required=True)
    parser.add_argument("--check", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    chains = [one for path in asked.steps for one in passes_of(path, "chain")]
    plain = [one for path in asked.steps for one in passes_of(path, "plain")]
    accepted = acceptance(passes_of(asked.acceptance, "chain"))
    steps = MeasuredSteps(chains + plain)
    checked = check(steps, accepted, asked.check)
    print("acceptance by node:", ", ".join(f"{one:.2f}" for one in accepted))
    print("\nThis machine, predicted and measured\nmode   at once  TPOT ms  measured  error")
    for one in checked:
        print(
            f"{one['mode']:6} {one['requests']:7}  {one['tpot'] * 1e3:7.2f}  "
            f"{one['measured_tpot'] * 1e3:8.2f}  {one['error']:+.0%}"
        )
    simulated = {}
    for name in GPUS:
        times = gpu(name)
        found = [predict(times, accepted, requests) for requests in REQUESTS]
        simulated[name] = {"free_tokens": times.free_tokens, "rows": [row(one) for one in found]}
        print(f"\nSimulation, {name}, 8B, bfloat16, {times.context} tokens of context; reading the")
        print(f"weights hides the arithmetic of {times.free_tokens:.0f} tokens per step")
        print("at once  nodes  tokens/s  TPOT ms  against plain")
        for one in found:
            print(
                f"{one.requests:7}  {one.nodes:5}  {one.tokens_per_second:8.0f}  "
                f"{one.tpot * 1e3:7.2f}  {one.tokens_per_second / one.plain:.2f}x"
            )
    if asked.out is not None:
        found_all = {
            "acceptance": accepted,
            "step_seconds": dict(zip(("a", "b", "c", "d", "e"), steps.fitted.tolist())),
            "check": checked,
            "simulated": simulated,
        }
        write_text(asked.out, json.dumps(found_all, indent=1) + "\n")


if __name__ == "__main__":
    main()

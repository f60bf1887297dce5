"""Predicts an engine's speed by the number of requests, and checks it against measurements.

python bench/simulate_serving.py --steps STEPS.json … --acceptance FIXED.json --check CHECK.json

The files are those of ``token-recycling bench-serving --out``: STEPS with plain steps and chains
of several fixed lengths (``--options '{"automatic": "false"}'``), FIXED with the longest of these,
and CHECK with the plug-in's own choice, at other numbers of requests. The tables for GPUs come from
data sheets, not from measurements.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from token_recycling.bench.serving.simulate import (
    MeasuredSteps,
    Prediction,
    RooflineSteps,
    acceptance,
    predict,
)
from token_recycling.files import write_text

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

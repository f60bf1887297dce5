"""Serves a load with vLLM, in a process of its own.

python -m engine_bench.drive_vllm LOAD.json OUT.json
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from engine_bench.load import Arrivals, Load, Pass


def arguments(load: Load) -> dict[str, Any]:
    """Return vLLM's engine arguments."""
    ours = {"method": "token_recycling", "mode": load.mode, **load.options}
    speculative: dict[str, dict[str, Any]] = {
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": load.chain,
            "prompt_lookup_max": 4,
        },
        # On the device, in Model Runner V2
        "ngram_gpu": {
            "method": "ngram_gpu",
            "num_speculative_tokens": load.chain,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        },
        "chain": {**ours, "num_speculative_tokens": load.chain},
        "tree": {**ours, "num_speculative_tokens": load.tree},
    }
    found = {
        "model": load.model,
        "max_num_seqs": max(load.concurrency),
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        **load.arguments,
    }
    if load.mode != "plain":
        found["speculative_config"] = speculative[load.mode]
    return found


class Gaps:
    """The times between a model's logits and its next forward, in this process.

    Attributes:
        seconds: of each gap.
        tokens: that the last forward has read.
    """

    def __init__(self, model: Any) -> None:
        """Watch the forwards of ``model``."""
        self.seconds: list[float] = []
        self.tokens = 0
        self._ended: float | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        compute = model.compute_logits

        @wraps(compute)
        def compute_logits(*arguments: Any, **options: Any) -> Any:
            logits = compute(*arguments, **options)
            self._ended = perf_counter()
            return logits

        model.compute_logits = compute_logits

    def _begin(self, model: Any, arguments: Any, named: dict[str, Any]) -> None:
        self.tokens = [*arguments, *named.values()][0].shape[-1]  # of token ids or positions
        if self._ended is not None:
            self.seconds.append(perf_counter() - self._ended)

    def take(self) -> list[float]:
        """Return the gaps since the last call."""
        found, self.seconds, self._ended = self.seconds, [], None
        return found


def serve(engine: Any, load: Load, prompts: list[list[int]], concurrency: int, gaps: Gaps) -> Pass:
    """Serve ``prompts`` with ``concurrency`` requests at once; return texts and times."""
    from vllm import SamplingParams

    found = Pass(concurrency)
    steps: dict[tuple[int, int], list[float]] = {}
    gaps.take()
    texts: dict[int, list[int]] = {}
    times: dict[str, Arrivals] = {}
    waiting = list(range(len(prompts)))[::-1]
    begun = perf_counter()
    while len(texts) < len(prompts):
        while waiting and len(times) < concurrency:
            i = waiting.pop()
            sampling = SamplingParams(
                temperature=load.temperature,
                seed=i if load.temperature else None,
                max_tokens=load.new_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            times[str(i)] = Arrivals(perf_counter())
            engine.add_request(str(i), {"prompt_token_ids": prompts[i]}, sampling)
        decoding = all(one.begun for one in times.values())
        before = perf_counter()
        outputs = engine.step()
        now = perf_counter()
        if decoding:
            steps.setdefault((len(times), gaps.tokens), []).append(now - before)
        for output in outputs:
            tokens = output.outputs[0].token_ids
            times[output.request_id].add(len(tokens), now)
            if output.finished:
                times.pop(output.request_id).end(found)
                texts[int(output.request_id)] = list(tokens)
    found.seconds = perf_counter() - begun
    found.texts = [texts[i] for i in range(len(prompts))]
    found.costs = [(*key, len(taken), median(taken)) for key, taken in sorted(steps.items())]
    found.gaps = gaps.take()
    return found


def main() -> None:
    """Start vLLM, and serve all prompts once for each concurrency."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the gaps are measured here
    load = Load.read(Path(sys.argv[1]))
    from vllm import EngineArgs, LLMEngine
    from vllm.v1.metrics.reader import get_metrics_snapshot

    engine = LLMEngine.from_engine_args(EngineArgs(**arguments(load)))
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    gaps = Gaps(runner.model)

    def counted() -> tuple[int, int, list[int]]:
        figures = {
            metric.name.removeprefix("vllm:spec_decode_"): metric
            for metric in get_metrics_snapshot()
        }
        drafts = getattr(figures.get("num_drafts"), "value", 0)
        accepted = getattr(figures.get("num_accepted_tokens"), "value", 0)
        return drafts, accepted, getattr(figures.get("num_accepted_tokens_per_pos"), "values", [])

    serve(engine, load, load.warm_up, len(load.warm_up), gaps)
    passes = []
    for turn, concurrency in enumerate(load.concurrency):
        before = counted()
        found = serve(engine, load, load.of(turn), concurrency, gaps)
        after = counted()
        found.drafts, found.accepted = after[0] - before[0], after[1] - before[1]
        earlier = before[2] or [0] * len(after[2])
        found.accepted_at = [b - a for a, b in zip(earlier, after[2])]
        passes.append(asdict(found))
    Path(sys.argv[2]).write_text(json.dumps(passes), encoding="utf-8")


if __name__ == "__main__":
    main()

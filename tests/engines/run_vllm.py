"""Serve requests with vLLM in this process, and write what came; called by test_vllm.py.

python tests/engines/run_vllm.py '{…}' OUT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    options = json.loads(sys.argv[1])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if options.get("process") else "0"
    from transformers import AutoTokenizer
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.v1.metrics.reader import get_metrics_snapshot

    import mutations
    from requests_plan import plan

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
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    requests = options.get("requests") or plan(lambda text: tokenizer(text)["input_ids"])
    waiting = list(enumerate(requests))
    texts: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    at_once, live = options.get("at_once", 8), set()
    while waiting or live:
        while waiting and len(live) < at_once:
            i, request = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=request["tokens"],
                ignore_eos=True,
                **(options.get("sampling", {}) | request.get("sampling", {})),
            )
            engine.add_request(str(i), {"prompt_token_ids": request["prompt"]}, sampling)
            live.add(str(i))
        for output in engine.step():
            texts[output.request_id] = list(output.outputs[0].token_ids)
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
        "metrics": metrics,
    }
    Path(sys.argv[2]).write_text(json.dumps(found))
    if options.get("process"):
        engine.engine_core.shutdown()


if __name__ == "__main__":
    main()

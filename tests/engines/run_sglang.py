"""Serve requests with SGLang on a CPU, and write what came; called by test_sglang.py.

python tests/engines/run_sglang.py OPTIONS.json OUT.json
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import mutations
from requests_plan import begun, sets


async def answer(engine, request: dict, sampling: dict) -> dict:
    """Stream one request; end it in the middle where the plan says so."""
    sampling = {"temperature": 0.0, "ignore_eos": True} | sampling | request.get("sampling", {})
    found: dict = {"text": [], "steps": 0}
    stream = await engine.async_generate(
        input_ids=request["prompt"],
        sampling_params=sampling | {"max_new_tokens": request["tokens"]},
        stream=True,
    )
    async for part in stream:
        found["text"], found["meta"] = part["output_ids"], part["meta_info"]
        found["steps"] += 1
        if request["abort"] is not None and len(found["text"]) >= request["abort"]:
            engine.tokenizer_manager.abort_request(part["meta_info"]["id"])
            break
    return found


async def serve(engine, asked: dict) -> dict:
    """Ask for all requests of a set, some at a time."""
    gate = asyncio.Semaphore(asked.get("at_once", 8))
    found: dict[int, dict] = {}

    async def turn(i: int, request: dict) -> None:
        async with gate:
            found[i] = await answer(engine, request, asked.get("sampling", {}))

    requests = asked["requests"]
    while len(found) < len(requests):
        texts = {i: one["text"] for i, one in found.items()}
        await asyncio.gather(*(turn(i, request) for i, request in begun(requests, texts)))
    ordered = [found[i] for i in range(len(requests))]
    return {
        "texts": [one["text"] for one in ordered],
        "steps": sum(one["steps"] for one in ordered),
        "accepted": [one["meta"].get("spec_accept_length") for one in ordered],
        "verified": [one["meta"].get("spec_verify_ct") for one in ordered],
        "retracted": [one["meta"].get("num_retractions", 0) for one in ordered],
        "cached": [one["meta"].get("cached_tokens", 0) for one in ordered],
    }


def main() -> None:
    options = json.loads(Path(sys.argv[1]).read_text())
    asked = sets(options["model"])
    if options.get("without"):
        os.environ["TOKEN_RECYCLING_TEST_WITHOUT"] = "1"  # in the processes that follow, too
        mutations.hide_the_package()
    import sglang

    args = {
        "model_path": options["model"],
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "intel_amx",
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.4,
        "max_total_tokens": 16384,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        "context_length": 1024,
        "disable_cuda_graph": True,
        "log_level": "warning",
    }
    found = {}
    for names in options["lives"]:  # of the scheduler's process, one after the other
        engine = sglang.Engine(**args | options["engine"])
        for name in names:
            found[name] = engine.loop.run_until_complete(serve(engine, asked[name]))
        engine.shutdown()
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Serve requests with SGLang on this machine, and write what came; called by test_sglang.py.

python tests/engines/run_sglang.py '{…}' OUT.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import mutations
from requests_plan import whole_plan


async def answer(engine, request: dict, options: dict) -> dict:
    """Stream one request; end it in the middle where the plan says so."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": request["tokens"]}
    sampling |= options.get("sampling", {}) | request.get("sampling", {})
    found: dict = {"text": [], "steps": 0}
    stream = await engine.async_generate(
        input_ids=request["prompt"], sampling_params=sampling, stream=True
    )
    async for part in stream:
        found["text"] = part["output_ids"]
        found["steps"] += 1
        found["meta"] = part["meta_info"]
        if request["abort"] is not None and len(found["text"]) >= request["abort"]:
            engine.tokenizer_manager.abort_request(part["meta_info"]["id"])
            break
    return found


async def serve(engine, requests: list[dict], options: dict) -> list[dict]:
    gate = asyncio.Semaphore(options.get("at_once", 8))

    async def turn(request: dict) -> dict:
        async with gate:
            return await answer(engine, request, options)

    return await asyncio.gather(*map(turn, requests))


def main() -> None:
    options = json.loads(sys.argv[1])
    requests = options.get("requests")
    if requests is None:
        requests = whole_plan(options["model"])
    import sglang

    engine = sglang.Engine(
        model_path=options["model"],
        device="cpu",
        dtype="float32",
        attention_backend="intel_amx",
        skip_tokenizer_init=True,
        mem_fraction_static=0.4,
        max_total_tokens=16384,
        max_running_requests=8,
        chunked_prefill_size=64,
        context_length=1024,
        disable_cuda_graph=True,
        log_level="warning",
        **options.get("engine", {}),
    )
    found = engine.loop.run_until_complete(serve(engine, requests, options))
    Path(sys.argv[2]).write_text(
        json.dumps(
            {
                "texts": [one["text"] for one in found],
                "steps": sum(one["steps"] for one in found),
                "accept": [one["meta"].get("spec_accept_length") for one in found],
                "cached": [one["meta"].get("cached_tokens", 0) for one in found],
                "meta": found[-1]["meta"] if found else {},
            },
            default=str,
        )
    )
    engine.shutdown()


if __name__ == "__main__":
    main()

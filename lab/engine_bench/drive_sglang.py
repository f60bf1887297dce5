"""Serves a load with SGLang, in a process of its own.

python -m engine_bench.drive_sglang LOAD.json OUT.json
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from engine_bench.load import Arrivals, Load, Pass


def arguments(load: Load) -> dict[str, Any]:
    """Return SGLang's engine arguments."""
    speculative: dict[str, dict[str, Any]] = {
        "plain": {},
        "ngram": {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": load.chain + 1,
        },
        "tree": {
            "speculative_algorithm": "TOKEN_RECYCLING",
            "speculative_num_draft_tokens": load.tree + 1,
        },
    }
    return {
        "model_path": load.model,
        "skip_tokenizer_init": True,
        "max_running_requests": max(load.concurrency),
        "log_level": "warning",
        **speculative[load.mode],
        **load.arguments,
    }


async def serve(engine: Any, load: Load, prompts: list[list[int]], concurrency: int) -> Pass:
    """Serve ``prompts`` with ``concurrency`` requests at once; return texts and times."""
    found = Pass(concurrency)
    texts: dict[int, list[int]] = {}
    turn = asyncio.Semaphore(concurrency)
    sampling: dict[str, Any] = {
        "temperature": load.temperature,
        "max_new_tokens": load.new_tokens,
        "ignore_eos": True,
    }

    async def answer(i: int) -> None:
        async with turn:
            times = Arrivals(perf_counter())
            parts = await engine.async_generate(
                input_ids=prompts[i], sampling_params=sampling, stream=True
            )
            text: list[int] = []
            meta: dict[str, Any] = {}
            async for part in parts:
                new, meta = part["output_ids"], part["meta_info"]
                # Either all tokens so far, or only those since the last part
                text = new if len(new) == meta["completion_tokens"] else [*text, *new]
                times.add(len(text), perf_counter())
            times.end(found)
            texts[i] = text
            verified = meta.get("spec_verify_ct", 0)
            found.drafts += verified
            found.accepted += len(text) - 1 - verified if verified else 0

    begun = perf_counter()
    await asyncio.gather(*(answer(i) for i in range(len(prompts))))
    found.seconds = perf_counter() - begun
    found.texts = [texts[i] for i in range(len(prompts))]
    return found


def main() -> None:
    """Start SGLang, and serve all prompts once for each concurrency."""
    load = Load.read(Path(sys.argv[1]))
    for name, value in load.options.items():
        os.environ["TOKEN_RECYCLING_" + name.upper()] = str(value)
    import sglang

    engine = sglang.Engine(**arguments(load))

    def run(prompts: list[list[int]], concurrency: int) -> Pass:
        work = serve(engine, load, prompts, concurrency)
        found: Pass = engine.loop.run_until_complete(work)
        return found

    run(load.warm_up, len(load.warm_up))
    passes = [
        asdict(run(load.of(turn), concurrency)) for turn, concurrency in enumerate(load.concurrency)
    ]
    engine.shutdown()
    Path(sys.argv[2]).write_text(json.dumps(passes), encoding="utf-8")


if __name__ == "__main__":
    main()

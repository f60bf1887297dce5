"""SGLang on one GPU: plain decoding, its n-gram drafts, and ours, beside each other.

python lab/gpu_sglang.py serve MODE CHECKPOINT PROMPTS.json OUT.json READY…    one engine, one mode

MODE is plain, ngram or ours; all else as in gpu_vllm.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LOADS = (1, 4, 16, 32)
NEW = int(os.environ.get("NEW", "96"))
NODES = int(os.environ.get("NODES", "32"))
SPECULATIVE: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 16},
    "ours": {"speculative_algorithm": "TOKEN_RECYCLING", "speculative_num_draft_tokens": NODES},
}
ENGINE = {
    "dtype": "bfloat16",
    "context_length": 2048,
    "max_running_requests": 32,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_radix_cache": True,
    "mem_fraction_static": 0.25,
    "skip_tokenizer_init": True,
    "log_level": "warning",
}


def measured(engine: Any, prompts: list[list[int]], at_once: int) -> dict[str, Any]:
    """Tokens per second of every batch, texts, and the mean number of tokens of a step."""
    sampling = {"temperature": 0.0, "max_new_tokens": NEW, "stop_token_ids": [2]}
    rates, texts, steps = [], [], 0
    began = time.perf_counter()
    for begin in range(0, len(prompts), at_once):
        start = time.perf_counter()
        answers = engine.generate(
            input_ids=prompts[begin : begin + at_once], sampling_params=sampling
        )
        seconds = time.perf_counter() - start
        new = [answer["output_ids"] for answer in answers]
        rates.append(round(sum(map(len, new)) / seconds, 1))
        texts += new
        steps += sum(
            answer["meta_info"].get("spec_verify_ct") or len(answer["output_ids"])
            for answer in answers
        )
    total = sum(map(len, texts))
    rate = round(total / (time.perf_counter() - began), 1)
    return {"tokens_per_s": rate, "rates": rates, "mat": total / steps, "texts": texts}


def serve(mode: str, checkpoint: str, file: str, out: Path, ready: list[Path]) -> None:
    """Load an engine, wait for the others, and measure alone."""
    import sglang

    prompts = json.loads(Path(file).read_text())
    options = ENGINE | json.loads(os.environ.get("ENGINE", "{}"))
    engine = sglang.Engine(model_path=checkpoint, **options, **SPECULATIVE[mode])
    measured(engine, prompts[-2:], 1)
    measured(engine, prompts[-4:-2], 2)
    ready[0].touch()
    while not all(path.exists() for path in ready):
        time.sleep(0.2)
    found: dict[str, Any] = {"mode": mode, "chat": {}}
    with (out.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = 0
        for load in (load for load in LOADS if load <= options["max_running_requests"]):
            count = max(load, min(2 * load, 10))
            batch = [prompts[at % len(prompts)] for at in range(first, first + count)]
            first += count
            found["chat"][load] = measured(engine, batch, load)
            out.write_text(json.dumps(found))
            print(mode, load, found["chat"][load]["tokens_per_s"], flush=True)
    engine.shutdown()


if __name__ == "__main__":
    _, _, mode, checkpoint, file, out, *ready = sys.argv
    serve(mode, checkpoint, file, Path(out), list(map(Path, ready)))

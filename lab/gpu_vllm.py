"""vLLM on one GPU: plain, its n-gram drafts on the device, our chains and trees, side by side.

python lab/gpu_vllm.py serve MODE CHECKPOINT PROMPTS.json OUT.json READY…    one engine of one mode

MODE is plain, ngram_gpu, chain or ours, the default, which drafts trees where it can. PROMPTS.json
is a list of lists of tokens. All engines are loaded side by side; READY are files, the first of
which is this engine's: once all exist, the engines measure one after another. Writes its figures
after every part, since the machine may end.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

LOADS = (1, 4, 16, 32, 64)
NEW = int(os.environ.get("NEW", "96"))
DRAFTED = 6
SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram_gpu": {
        "method": "ngram_gpu",
        "num_speculative_tokens": DRAFTED,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    },
    "chain": {"method": "token_recycling", "mode": "chain"},
    "ours": {"method": "token_recycling"} | json.loads(os.environ.get("OURS", "{}")),
}
# GPU memory of each of four engines: the weights of Llama 3 8B's shape, and the cache
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.22,
    "kv_cache_memory_bytes": 5 << 30,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "skip_tokenizer_init": True,
}


def counts(llm: Any) -> dict[str, float]:
    """vLLM's own counts of drafts."""
    return {
        metric.name.split("spec_decode_")[1]: metric.value
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name and hasattr(metric, "value")
    }


def measured(llm: Any, prompts: list[list[int]], at_once: int, sampling: Any) -> dict[str, Any]:
    """Tokens per second of every batch, texts, and counts of drafts."""
    before, rates, texts = counts(llm), [], []
    began = time.perf_counter()
    for begin in range(0, len(prompts), at_once):
        batch = [{"prompt_token_ids": ids} for ids in prompts[begin : begin + at_once]]
        start = time.perf_counter()
        answers = llm.generate(batch, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        new = [list(answer.outputs[0].token_ids) for answer in answers]
        rates.append(round(sum(map(len, new)) / seconds, 1))
        texts += new
    seconds = time.perf_counter() - began
    spec = {name: value - before.get(name, 0) for name, value in counts(llm).items()}
    mat = 1 + spec["num_accepted_tokens"] / max(spec["num_drafts"], 1) if spec else 1.0
    rate = round(sum(map(len, texts)) / seconds, 1)
    return {"tokens_per_s": rate, "rates": rates, "mat": mat, "texts": texts}


def serve(mode: str, checkpoint: str, file: str, out: Path, ready: list[Path]) -> None:
    """Load an engine, wait for the others, and measure alone."""
    from vllm import LLM, SamplingParams

    prompts = json.loads(Path(file).read_text())
    options = ENGINE | json.loads(os.environ.get("ENGINE", "{}"))
    llm = LLM(model=checkpoint, speculative_config=SPECULATIVE[mode], **options)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW, stop_token_ids=[2], detokenize=False)
    measured(llm, prompts[-2:], 1, greedy)
    ready[0].touch()
    while not all(path.exists() for path in ready):
        time.sleep(0.2)
    rng = random.Random(0)
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    loads = [load for load in LOADS if load <= options["max_num_seqs"]]
    found: dict[str, Any] = {"mode": mode, "chat": {}, "random": {}, "seeds": {}}
    with (out.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = 0
        for load in loads:  # no prompt twice: a drafter would have seen it
            count = max(load, min(2 * load, 10))
            batch = [prompts[at % len(prompts)] for at in range(first, first + count)]
            first += count
            found["chat"][load] = measured(llm, batch, load, greedy)
            out.write_text(json.dumps(found))
            print(mode, load, found["chat"][load]["tokens_per_s"], flush=True)
        for load in loads:
            batch = [[rng.randrange(vocabulary) for _ in range(64)] for _ in range(2 * load)]
            sampling = SamplingParams(
                temperature=1.0, max_tokens=NEW, ignore_eos=True, detokenize=False
            )
            found["random"][load] = measured(llm, batch, load, sampling) | {"texts": []}
            out.write_text(json.dumps(found))
            print(mode, "random", load, found["random"][load]["tokens_per_s"], flush=True)
        sampling = SamplingParams(
            temperature=0.8, seed=7, max_tokens=NEW, stop_token_ids=[2], detokenize=False
        )
        found["seeds"][4] = measured(llm, prompts[:8], 4, sampling)
        out.write_text(json.dumps(found))
    os._exit(0)  # an engine's threads may not end


if __name__ == "__main__":
    _, _, mode, checkpoint, file, out, *ready = sys.argv
    serve(mode, checkpoint, file, Path(out), list(map(Path, ready)))

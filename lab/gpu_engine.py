"""An engine on one GPU in several modes beside each other: plain, its n-gram drafts, and ours.

python lab/gpu_engine.py serve ENGINE MODE CHECKPOINT PROMPTS.json OUT.json READY…    one mode
python lab/gpu_engine.py compare FOLDER    what was found, relative to plain decoding

ENGINE is vllm (plain, ngram_gpu, chain, or ours, which drafts trees where it can) or sglang (plain,
ngram or ours). PROMPTS.json is a list of lists of tokens: chat prompts, of which none comes twice
as far as they last. vLLM is also measured with random tokens at temperature 1. All modes are loaded
side by side; READY are files, the first of which is this mode's: once all exist, they measure one
after another. The figures are written after every pass, since the machine may end.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sys
import time
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import engines
from engines import Load, Pass

LOADS = (1, 4, 16, 32, 64)
PARTS = ("chat", "random")
ENGINE: dict[str, dict[str, Any]] = {
    # GPU memory of each of four engines: the weights of Llama 3 8B's shape, and the cache
    "vllm": {
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.22,
        "kv_cache_memory_bytes": 5 << 30,
        "enable_prefix_caching": False,
    },
    "sglang": {
        "dtype": "bfloat16",
        "context_length": 2048,
        "max_running_requests": 32,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_radix_cache": True,
        "mem_fraction_static": 0.25,
    },
}
OURS = {"method": "token_recycling"} | json.loads(os.environ.get("OURS", "{}"))
# What a mode is called in ``engines.py``, and more arguments of the engine
MODES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "vllm": {
        **{mode: (mode, {}) for mode in ("plain", "ngram_gpu", "chain")},
        "ours": ("plain", {"speculative_config": OURS}),
    },
    "sglang": {"plain": ("plain", {}), "ngram": ("ngram", {}), "ours": ("tree", {})},
}


def loads(engine: str, mode: str, checkpoint: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the loads of each part."""
    driven, more = MODES[engine][mode]
    arguments = ENGINE[engine] | json.loads(os.environ.get("ENGINE", "{}")) | more
    most = arguments.get("max_num_seqs") or arguments["max_running_requests"]
    chat = Load(
        model=checkpoint,
        mode=driven,
        arguments=arguments,
        warm_up=prompts[-2:],
        prompts=[],
        new_tokens=int(os.environ.get("NEW", "96")),
        temperature=0.0,
        concurrency=[],
        chain=6 if engine == "vllm" else 15,
        tree=int(os.environ.get("NODES", "32")) - 1,
        stop=[2],
    )
    found: dict[str, Any] = {part: [] for part in PARTS}
    draws, asked = random.Random(0), cycle(prompts)
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    for count in (count for count in LOADS if count <= most):
        one = replace(chat, concurrency=[count])
        own = list(islice(asked, max(count, min(2 * count, 10))))
        found["chat"].append(replace(one, prompts=own))
        if engine == "vllm":
            tokens = [
                [draws.randrange(config["vocab_size"]) for _ in range(64)] for _ in range(2 * count)
            ]
            found["random"].append(replace(one, prompts=tokens, temperature=1.0, stop=[]))
    return found


def serve(engine: str, mode: str, checkpoint: str, file: str, out: str, *files: str) -> None:
    """Load an engine, wait for the others, and measure alone."""
    parts = loads(engine, mode, checkpoint, json.loads(Path(file).read_text()))
    ready = list(map(Path, files))
    lock = (Path(out).parent / "lock").open("w")

    def wait() -> None:
        ready[0].touch()
        while not all(path.exists() for path in ready):
            time.sleep(0.2)
        fcntl.flock(lock, fcntl.LOCK_EX)

    passes = engines.run(engine, [*parts["chat"], *parts["random"]], wait)
    found: dict[str, list[Any]] = {part: [] for part in PARTS}
    for part, own in parts.items():
        for one in islice(passes, len(own)):
            found[part].append(asdict(one))
            Path(out).write_text(json.dumps(found))
            print(mode, part, one.concurrency, f"{one.rate:.1f} tokens/s", flush=True)
    lock.close()
    next(passes, None)
    os._exit(0)  # an engine's threads may not end


def compare(folder: str) -> None:
    """Print figures and ratios to plain decoding, and how many texts are the same."""
    from bench_serving import summary, table

    files = [Path(folder) / f"{mode}.json" for mode in dict.fromkeys([*MODES["vllm"], "ngram"])]
    found = {file.stem: json.loads(file.read_text()) for file in files if file.exists()}
    for part in PARTS:
        lives = {
            mode: [[Pass(**one) for one in its[part]]] for mode, its in found.items() if its[part]
        }
        if lives:
            print(f"{part}\n{table(summary(lives))}")


if __name__ == "__main__":
    {"serve": serve, "compare": compare}[sys.argv[1]](*sys.argv[2:])

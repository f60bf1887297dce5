"""Tokens per second of vLLM or SGLang on one model; a process of its own for each way to draft.

python bench/gpu_engines.py ENGINE WAY OPTIONS.json OUT.json

ENGINE: vllm or sglang. WAY: plain, ngram (the engine's own) or recycling (ours). OPTIONS holds
"model" (a folder), "prompts" (lists of token ids), "new_tokens", "rounds", "dtype" and "engine"
(more arguments of the engine). Requests run one at a time, as in the rest of the suite.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("plain", "ngram", "recycling")
DRAFTED = 6  # tokens of a chain, ours and n-gram's
VLLM: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": DRAFTED,
            "prompt_lookup_max": 4,
        }
    },
    "recycling": {
        "speculative_config": {
            "method": "custom_class",
            "model": "token_recycling.integrations.vllm.Proposer",
            "num_speculative_tokens": DRAFTED,
        }
    },
}
SGLANG: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": DRAFTED + 1},
    "recycling": {
        "speculative_algorithm": "TOKEN_RECYCLING",
        "speculative_num_draft_tokens": DRAFTED + 1,
    },
}
Answer = Callable[[list[int]], list[int]]


def vllm(way: str, options: dict[str, Any]) -> Answer:
    """Start vLLM; return a function that answers a prompt."""
    from vllm import LLM, SamplingParams

    arguments = VLLM[way] | options["engine"]
    engine = LLM(options["model"], dtype=options["dtype"], skip_tokenizer_init=True, **arguments)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=options["new_tokens"], ignore_eos=True, detokenize=False
    )

    def answer(prompt: list[int]) -> list[int]:
        [output] = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    return answer


def sglang(way: str, options: dict[str, Any]) -> Answer:
    """Start SGLang; return a function that answers a prompt."""
    import sglang as package

    engine = package.Engine(
        model_path=options["model"],
        dtype=options["dtype"],
        skip_tokenizer_init=True,
        log_level="warning",
        **(SGLANG[way] | options["engine"]),
    )
    sampling = {
        "temperature": 0.0,
        "max_new_tokens": options["new_tokens"],
        "ignore_eos": True,
    }

    def answer(prompt: list[int]) -> list[int]:
        output = engine.generate(input_ids=prompt, sampling_params=sampling)
        return list(output["output_ids"])

    return answer


def main() -> None:
    """Answer all prompts once to warm up, then in rounds."""
    engine, way, asked, out = sys.argv[1:]
    options = json.loads(Path(asked).read_text(encoding="utf-8"))
    answer = {"vllm": vllm, "sglang": sglang}[engine](way, options)
    texts = [answer(prompt) for prompt in options["prompts"]]
    taken = []
    for _ in range(options["rounds"]):
        for prompt in options["prompts"]:
            begin = time.perf_counter()
            count = len(answer(prompt))
            taken.append([count, time.perf_counter() - begin])
    Path(out).write_text(json.dumps({"taken": taken, "texts": texts}), encoding="utf-8")


if __name__ == "__main__":
    main()

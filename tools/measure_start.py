"""What a start costs: cold, poisoned or another order of prompts, against a hot one.

python tools/measure_start.py [--out FILE.json] [-m MODEL] [--dtype DTYPE]

Recyclers of one model answer half of the builtin suite question by question in turns, so that a
busy moment of the machine falls on all of them. "hot" has answered the other half before; "other
order" too, and gets its questions in another order; "seen" has answered these very questions;
"cold" knows nothing; "poisoned" began with random rows, or with random counts as well.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

from token_recycling import TokenRecycling
from token_recycling.bench import suites
from token_recycling.bench.runner import conversation
from token_recycling.files import write_text
from token_recycling.machine import describe
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.metrics import Step

OTHERS = ("other order", "seen", "cold", "poisoned rows", "poisoned all")
EARLY = 500  # tokens after which a start should not be felt


def poison(matrix: AdjacencyMatrix) -> None:
    """Fill everything that was learnt with what is wrong."""
    matrix.all_candidates.random_(0, matrix.vocab_size)
    matrix.all_probabilities.copy_(torch.randn(matrix.all_probabilities.shape).softmax(1))
    matrix.keys.random_(0, matrix.vocab_size**2)
    matrix.evidence.uniform_(0, 3)
    matrix.evidence[0] = matrix.evidence.amin(dim=0)


def measure(
    model: str | None, dtype: str | None, per_kind: int, new_tokens: int
) -> dict[str, object]:
    """Return tokens, steps and seconds of each start, early and later."""
    torch.manual_seed(0)
    hot = TokenRecycling.from_pretrained(model, dtype=dtype, device="cpu", warm=False)
    questions = suites.load_all(["builtin"], 2 * per_kind)
    prompts = [conversation(hot, [question.turns[0]], raw=False) for question in questions]
    random.Random(0).shuffle(prompts)  # kinds mixed, so that early is like later
    half = len(prompts) // 2
    before, prompts = prompts[:half], prompts[half:]
    recyclers = {"hot": hot} | {
        name: TokenRecycling(hot.model, hot.tokenizer, warm=False) for name in OTHERS
    }
    for prompt in before:
        hot.generate(prompt, max_new_tokens=new_tokens)
    for name in ("other order", "seen"):
        recyclers[name].matrix.copy_(hot.matrix)
    for prompt in prompts:
        recyclers["seen"].generate(prompt, max_new_tokens=new_tokens)
    poison(recyclers["poisoned rows"].matrix)
    recyclers["poisoned rows"].matrix.evidence.zero_()
    poison(recyclers["poisoned all"].matrix)
    orders = {name: list(range(len(prompts))) for name in recyclers}
    random.Random(1).shuffle(orders["other order"])
    texts: dict[str, dict[int, str]] = {name: {} for name in recyclers}
    found = {name: {"early": [0, 0, 0.0], "later": [0, 0, 0.0]} for name in recyclers}
    for turn in range(len(prompts)):
        for name, recycler in recyclers.items():
            steps: list[Step] = []
            index = orders[name][turn]
            answer = recycler.generate(
                prompts[index], max_new_tokens=new_tokens, on_step=steps.append
            )
            texts[name][index] = answer.text
            row = found[name]
            part = row["early" if sum(x[0] for x in row.values()) < EARLY else "later"]
            part[0] += sum(len(step.tokens[0]) for step in steps[1:])
            part[1] += len(steps) - 1
            part[2] += sum(sum(step.seconds) for step in steps[1:])
    return {
        "machine": describe(torch.device("cpu")),
        "model": model or "bundled",
        "dtype": str(hot.model.dtype),
        "questions": len(prompts),
        "new_tokens": new_tokens,
        "tokens, steps, seconds": found,
        "same text": {
            name: sum(text[i] == texts["hot"][i] for i in text) for name, text in texts.items()
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model")
    parser.add_argument("--dtype")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--per-kind", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.model, options.dtype, options.per_kind, options.new_tokens)
    if options.out:
        write_text(options.out, json.dumps(result, indent=1) + "\n")
    for start, parts in result["tokens, steps, seconds"].items():  # type: ignore[attr-defined]
        for part, (tokens, steps, seconds) in parts.items():
            print(f"{start:13} {part:6} MAT {tokens / steps:.2f}  {tokens / seconds:6.1f} tokens/s")
    print(result["same text"])

"""What the engines are asked in their tests; the same for all of them."""

from __future__ import annotations

import random
from typing import Any

from token_recycling.bench.suites import load
from token_recycling.prompts import DEMO

COUNT = 32
SHARED = 90  # tokens of a common beginning


def texts() -> list[str]:
    """Questions in the bundled model's language, some of them long."""
    return [*DEMO, *(question.turns[0] for question in load("builtin"))]


def plan(tokenize: Any, longest: int = 400, tokens: int = 60, count: int = COUNT) -> list[dict]:
    """Requests of different length: ``prompt`` ids, new ``tokens``, where to ``abort`` (or None).

    Every third shares its beginning with others. They are the same in every process.
    """
    rng = random.Random(11)
    prompts = [tokenize(text)[:longest] for text in texts()]
    shared = max(prompts, key=len)[:SHARED]
    found = []
    for i in range(count):
        prompt = list(prompts[i % len(prompts)])
        if i % 3 == 0:
            prompt = shared + prompt[: longest - SHARED]
        if i % 8 == 5:
            prompt = prompt[:1]
        new = rng.randint(tokens // 3, tokens)
        found.append({"prompt": prompt, "tokens": new, "abort": None})
    for i in range(4, count, 9):
        found[i]["abort"] = found[i]["tokens"] // 2
    return found


def whole_plan(model: str) -> list[dict]:
    """The plan for a model with the bundled model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return plan(lambda text: tokenizer(text)["input_ids"])

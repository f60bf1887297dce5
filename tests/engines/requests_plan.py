"""What the engines are asked in their tests; the same for all of them."""

from __future__ import annotations

import random
from typing import Any

COUNT = 32
SHARED = 90  # tokens of a common beginning


def texts() -> list[str]:
    """Questions in the bundled model's language, some of them long."""
    # Here, since processes of an engine without the package import this module, too.
    from token_recycling.bench.prompts import DEMO
    from token_recycling.bench.suites import load

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


def sets(model: str) -> dict[str, dict]:
    """Requests by the name of what they are for, for a model with the bundled model's tokenizer.

    A set has ``requests``, how many are ``at_once``, and ``sampling`` that differs from greedy
    decoding without an end. A request with ``after`` continues that one.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenize(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    alone = [request | {"abort": None} for request in plan(tokenize, tokens=120)]
    turns = [request | {"tokens": 70} for request in alone[:8]]
    turns += [request | {"after": i, "tokens": 40} for i, request in enumerate(turns)]
    kinds: list[dict] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"logprobs": 3},
        {"structured_outputs": {"regex": "[a-z ]{10,30}"}},
    ]
    return {
        "one by one": {"requests": alone, "at_once": 1, "sampling": {"ignore_eos": False}},
        "plan": {"requests": plan(tokenize)},
        "turns": {"requests": turns, "at_once": 4},
        "processors": {
            "requests": [
                request | {"tokens": 40, "sampling": kinds[i % 4]}
                for i, request in enumerate(alone[:12])
            ]
        },
        "samples": {
            "requests": [
                {"prompt": alone[0]["prompt"], "tokens": 8, "abort": None}
                | {"sampling": {"seed": seed}}
                for seed in range(60)
            ],
            "sampling": {"temperature": 1.0, "top_k": 50},
        },
        # To compare distributions; every eighth is greedy.
        "draws": {
            "requests": [
                {"prompt": alone[0]["prompt"], "tokens": 4, "abort": None}
                | {"sampling": {} if i % 8 else {"temperature": 0.0}}
                for i in range(640)
            ],
            "sampling": {"temperature": 1.0, "top_k": 4},
        },
    }


def to_the_end(limit: int) -> dict:
    """Requests that continue up to the longest context."""
    prompts = [[5 + i] * (i % 7 + 1) for i in range(12)]
    return {
        "requests": [
            {"prompt": prompt, "tokens": limit - len(prompt), "abort": None} for prompt in prompts
        ]
    }


def begun(requests: list[dict], texts: dict[int, list[int]]) -> list[tuple[int, dict]]:
    """Those that can be asked now: all that come after none, or after one that has ended."""
    found = []
    for i, request in enumerate(requests):
        if i in texts:
            continue
        after = request.get("after")
        if after is None:
            found.append((i, request))
        elif after in texts:
            found.append((i, request | {"prompt": requests[after]["prompt"] + texts[after]}))
    return found

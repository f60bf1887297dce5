"""What the engines are asked in their tests; the same for all of them."""

from __future__ import annotations

import random
from typing import Any

COUNT = 32
SHARED = 90  # tokens of a common beginning
# Ways to draw a token
KINDS: list[dict] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.0, "logprobs": 1},
]


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
    decoding without an end. A request with ``after`` continues that one; a ``group`` is decoded
    together, and before the next one.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def tokenize(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    longest = [token for text in texts() for token in tokenize(text)]
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
        # For Triton's interpreter, which takes seconds for a step
        "few": {"requests": plan(tokenize, longest=100, tokens=18, count=6), "at_once": 3},
        "growing": {  # each needs a third block of 32 tokens while it is decoded
            "requests": [
                {"prompt": longest[i * 60 :][:60], "tokens": 14, "abort": None} for i in range(4)
            ],
            "at_once": 3,
        },
        "one alone": {
            "requests": [{"prompt": longest[:60], "tokens": 14, "abort": None}],
        },
        "five at once": {  # the prompts come in chunks, beside requests that are decoded
            "requests": [
                {"prompt": longest[i * 40 :][: 20 + 10 * i], "tokens": 9, "abort": None}
                for i in range(5)
            ],
        },
        "few draws": {  # to compare distributions
            "requests": [{"prompt": alone[0]["prompt"][:24], "tokens": 3, "abort": None}] * 200,
            "sampling": {"temperature": 1.0, "top_k": 3},
        },
        "few kinds": {
            "requests": [
                {"prompt": alone[i % 3]["prompt"][:50], "tokens": 8, "abort": None}
                | {"sampling": kind}
                for i, kind in enumerate(
                    [
                        *kinds,
                        {"temperature": 1.0, "seed": 7},
                        {"temperature": 0.8, "seed": 8, "top_k": 20, "top_p": 0.9},
                        {"temperature": 1.0, "seed": 9, "min_p": 0.05},
                        {"logit_bias": {300: 3.0}, "logprobs": 1},
                    ]
                )
            ],
            "at_once": 4,
        },
        "some mixtures": mixtures(tokenize, 40, 1),
        **{f"many kinds, part {part}": many_kinds(longest, part) for part in range(5)},
        "mixtures": mixtures(tokenize, 500, 2),
    }


def many_kinds(tokens: list[int], part: int) -> dict:
    """Forty sampled requests, each with a seed; no two parts have the same."""
    return {
        "requests": [
            {"prompt": tokens[i % 9 * 30 :][:24], "tokens": 5, "abort": None}
            | {"sampling": {"seed": i} | KINDS[i % len(KINDS)]}
            for i in range(40 * part, 40 * part + 40)
        ],
    }


def mixtures(tokenize: Any, count: int, seed: int) -> dict:
    """Groups of two or four requests that are decoded together, each with options of its own."""
    rng = random.Random(seed)
    prompts = [tokenize(text)[:60] for text in texts()]
    common = [token for prompt in prompts for token in prompt]

    def sampling() -> dict:
        found: dict = {"ignore_eos": rng.random() < 0.5}
        if rng.random() < 0.5:
            found |= {"temperature": rng.choice([0.3, 0.7, 1.0, 1.5]), "seed": rng.randrange(10**6)}
            kinds = {
                "top_k": lambda: rng.choice([1, 2, 5, 50]),
                "top_p": lambda: rng.choice([0.3, 0.8, 0.95]),
                "min_p": lambda: rng.choice([0.02, 0.1, 0.5]),
            }
            found |= {name: value() for name, value in kinds.items() if rng.random() < 0.3}
        kinds = {
            "logprobs": lambda: rng.randrange(6),
            "repetition_penalty": lambda: rng.choice([0.8, 1.2, 1.5]),
            "presence_penalty": lambda: rng.choice([-0.5, 0.7]),
            "frequency_penalty": lambda: rng.choice([-0.5, 0.4]),
            "stop_token_ids": lambda: rng.sample(common, 100),
            "stop": lambda: [rng.choice([".", "the", "\n"])],
            "min_tokens": lambda: rng.randrange(2, 8),
            "logit_bias": lambda: {rng.choice(common): rng.choice([-5.0, 2.0, 5.0])},
            "bad_words": lambda: rng.sample(["the", "and a", "was"], 2),
            "allowed_token_ids": lambda: sorted({*common[:400], 2}),
            "prompt_logprobs": lambda: 1,
            "structured_outputs": lambda: {"regex": "[a-z ]{10,30}"},
        }
        likely = {"min_tokens": 0.4}
        found |= {
            name: value() for name, value in kinds.items() if rng.random() < likely.get(name, 0.15)
        }
        if "min_tokens" in found:  # without tokens that it keeps away it does nothing
            found["stop_token_ids"] = kinds["stop_token_ids"]()
        if "structured_outputs" in found:  # neither can be kept together with a grammar
            found.pop("allowed_token_ids", None)
            found.pop("bad_words", None)
        return found

    requests = []
    for group in range(count):
        for _ in range(rng.choice([2, 4])):
            request = {"prompt": rng.choice(prompts), "tokens": rng.randint(8, 24), "abort": None}
            requests.append(request | {"sampling": sampling(), "group": group})
    return {"requests": requests}


def to_the_end(limit: int) -> dict:
    """Requests that continue up to the longest context."""
    prompts = [[5 + i] * (i % 7 + 1) for i in range(12)]
    return {
        "requests": [
            {"prompt": prompt, "tokens": limit - len(prompt), "abort": None} for prompt in prompts
        ]
    }


def begun(requests: list[dict], texts: dict[int, list[int]]) -> list[tuple[int, dict]]:
    """Those that can be asked now: all that come after none, or after one that has ended.

    Of those with a group, these are the first group of which one has not ended.
    """
    found = []
    left = [i for i in range(len(requests)) if i not in texts]
    group = requests[left[0]].get("group") if left else None
    for i in left:
        request = requests[i]
        if request.get("group") != group:
            break
        after = request.get("after")
        if after is None:
            found.append((i, request))
        elif after in texts:
            found.append((i, request | {"prompt": requests[after]["prompt"] + texts[after]}))
    return found

"""What does `enable` cost? `model.generate` recycling against calling the core directly.

    python lab/measure_enable.py --out lab/results/cpu-enable.json

Both decode the same prompts with the same recycler from the same matrix, in turn, and the order
changes from round to round. Also: the price of float32 logits in bfloat16.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import transformers
import typer

from script import in_turn, run, save, seconds_of
from token_recycling import TokenRecycling, enable
from token_recycling.bench.measures import quartiles
from token_recycling.bench.prompts import DEMO
from token_recycling.decoding.text import encode
from token_recycling.util.machine import describe

NODES = 16  # an automatic size could choose other sizes on the two sides
CPU = torch.device("cpu")
Seconds = dict[str, list[float]]


def opened(**options: Any) -> tuple[TokenRecycling, list[list[int]]]:
    """Return a recycler whose answers have all their tokens, and the prompts."""
    recycler = TokenRecycling.from_pretrained(device="cpu", **options)
    recycler.model.generation_config.eos_token_id = None
    return recycler, [encode(recycler.tokenizer, [{"role": "user", "content": q}]) for q in DEMO]


def ratio(seconds: Seconds, name: str, base: str) -> dict[str, Any]:
    """Return the ratios of two ways."""
    return {
        "ratio_of_medians": median(seconds[name]) / median(seconds[base]),
        "quartiles_per_round": quartiles([a / b for a, b in zip(seconds[name], seconds[base])]),
    }


def wrapper_cost(tokens: int, rounds: int) -> dict[str, Any]:
    """Time ``model.generate`` after ``enable`` beside ``recycler.generate``, prompt by prompt."""
    recycler, prompts = opened(nodes=NODES)
    for prompt in prompts:
        recycler.generate(prompt, max_new_tokens=tokens)
    hot, answers, results = recycler.matrix.clone(), {}, []
    with enable(recycler.model, recycler.tokenizer, nodes=NODES) as enabled:

        def core(prompt: list[int]) -> None:
            answers["core"] = recycler.generate(prompt, max_new_tokens=tokens).token_ids

        def wrapped(prompt: list[int]) -> None:
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": tokens, "do_sample": False}
            out = recycler.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            answers["enable"] = out[0, ids.shape[1] :].tolist()

        def hot_start() -> None:
            recycler.matrix.copy_(hot)
            enabled.recycler.matrix.copy_(hot)

        for prompt in prompts:
            calls = {"core": partial(core, prompt), "enable": partial(wrapped, prompt)}
            ways = {name: partial(seconds_of, call) for name, call in calls.items()}
            results.append(in_turn(ways, rounds, hot_start))
            if len(answers["core"]) != tokens or answers["core"] != answers["enable"]:
                raise SystemExit("the two ways do not give the same tokens")
    total = {way: [sum(each) for each in zip(*(r[way] for r in results))] for way in results[0]}
    return {"seconds_per_prompt": results, **ratio(total, "enable", "core")}


def float32_logits_cost(tokens: int, rounds: int) -> dict[str, Any]:
    """Time steps in bfloat16 with the LM head in float32 beside those without."""
    plain, prompts = opened(dtype="bfloat16")
    float32 = TokenRecycling(plain.model, plain.tokenizer, float32_logits=True)

    def a_step(recycler: TokenRecycling) -> float:
        stats = [recycler.generate(p, max_new_tokens=tokens).stats for p in prompts]
        return sum(s.decode_seconds for s in stats) / sum(s.steps for s in stats)

    def cold() -> None:
        plain.reset()
        float32.reset()

    ways = {"rounded": lambda: a_step(plain), "float32": lambda: a_step(float32)}
    steps = in_turn(ways, rounds, cold)
    return {"seconds_per_step": steps, **ratio(steps, "float32", "rounded")}


def main(
    out: Annotated[Path, typer.Option(help="the file to write")],
    tokens: int = 200,
    rounds: int = 7,
    threads: int = 2,
) -> None:
    """Measure both."""
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    parts = {
        "enable": wrapper_cost(tokens, rounds),
        "float32_logits": float32_logits_cost(tokens, rounds),
    }
    about = {"machine": describe(CPU), "threads": threads, "tokens": tokens, "rounds": rounds}
    save(out, about | parts)
    for name, part in parts.items():
        print(name, f"{part['ratio_of_medians']:.4f}", part["quartiles_per_round"])


if __name__ == "__main__":
    run(main)

"""What does `enable` cost? `model.generate` recycling against calling the core directly.

Both decode the same prompts with the same recycler from the same matrix, in turn, and the order
changes from round to round. Also: the price of float32 logits in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch
import transformers

from token_recycling import TokenRecycling, enable
from token_recycling.bench.prompts import DEMO
from token_recycling.decoding.text import encode
from token_recycling.util.files import write_atomically
from token_recycling.util.machine import describe

NODES = 16  # an automatic size could choose other sizes on the two sides


def prompts_of(recycler: TokenRecycling) -> list[list[int]]:
    return [encode(recycler.tokenizer, [{"role": "user", "content": q}]) for q in DEMO]


def compared(ways: dict, rounds: int, between) -> dict:
    """Seconds per way and round, in turn; the first round is warm-up."""
    seconds = {name: [] for name in ways}
    names = list(ways)
    for round_ in range(rounds + 1):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            between()
            begin = perf_counter()
            ways[name]()
            if round_:
                seconds[name].append(perf_counter() - begin)
    return seconds


def ratio(seconds: dict, name: str, base: str) -> dict:
    ratios = [a / b for a, b in zip(seconds[name], seconds[base])]
    low, _, high = quantiles(ratios, n=4)
    return {
        "ratio_of_medians": median(seconds[name]) / median(seconds[base]),
        "quartiles_per_round": [low, median(ratios), high],
    }


def wrapper_cost(tokens: int, rounds: int) -> dict:
    recycler = TokenRecycling.from_pretrained(device="cpu", nodes=NODES)
    recycler.model.generation_config.eos_token_id = None  # every answer has all its tokens
    prompts = prompts_of(recycler)
    for prompt in prompts:
        recycler.generate(prompt, max_new_tokens=tokens)
    hot = recycler.matrix.clone()
    with enable(recycler.model, recycler.tokenizer, nodes=NODES) as enabled:
        results = [
            one_prompt(recycler, enabled.recycler, hot, prompt, tokens, rounds)
            for prompt in prompts
        ]
    total = {
        name: [sum(r[name][i] for r in results) for i in range(rounds)]
        for name in ("core", "enable")
    }
    return {"seconds_per_prompt": results, **ratio(total, "enable", "core")}


def one_prompt(recycler, covered, hot, prompt: list[int], tokens: int, rounds: int) -> dict:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": tokens, "do_sample": False, "attention_mask": mask}
    answers = {}

    def core() -> None:
        answers["core"] = recycler.generate(prompt, max_new_tokens=tokens).token_ids

    def wrapped() -> None:
        out = recycler.model.generate(ids, **options)
        answers["enable"] = out[0, ids.shape[1] :].tolist()

    def hot_start() -> None:
        recycler.matrix.copy_(hot)
        covered.matrix.copy_(hot)

    seconds = compared({"core": core, "enable": wrapped}, rounds, hot_start)
    if not len(answers["core"]) == tokens or answers["core"] != answers["enable"]:
        raise SystemExit("the two ways do not give the same tokens")
    return seconds


def float32_logits_cost(tokens: int, rounds: int) -> dict:
    plain = TokenRecycling.from_pretrained(device="cpu", dtype="bfloat16")
    float32 = TokenRecycling(plain.model, plain.tokenizer, float32_logits=True)
    plain.model.generation_config.eos_token_id = None
    prompts = prompts_of(plain)
    rates = {}

    def run(recycler: TokenRecycling, name: str) -> None:
        stats = [recycler.generate(p, max_new_tokens=tokens).stats for p in prompts]
        steps = sum(s.steps for s in stats)
        rates.setdefault(name, []).append(sum(s.decode_seconds for s in stats) / steps)

    ways = {
        "rounded": lambda: run(plain, "rounded"),
        "float32": lambda: run(float32, "float32"),
    }

    def cold() -> None:
        plain.reset()
        float32.reset()

    compared(ways, rounds, cold)
    steps = {name: values[1:] for name, values in rates.items()}
    return {"seconds_per_step": steps, **ratio(steps, "float32", "rounded")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    result = {
        "machine": describe(torch.device("cpu")),
        "threads": options.threads,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "enable": wrapper_cost(options.tokens, options.rounds),
        "float32_logits": float32_logits_cost(options.tokens, options.rounds),
    }
    text = json.dumps(result, indent=1) + "\n"
    write_atomically(options.out, lambda partial: partial.write_text(text))
    for name in ("enable", "float32_logits"):
        part = result[name]
        print(name, f"{part['ratio_of_medians']:.4f}", part["quartiles_per_round"])


if __name__ == "__main__":
    main()

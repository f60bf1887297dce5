"""Measure single steps at growing context: does anything but attention grow?

    python tools/measure_context.py --out bench/results/cpu-context.json

For every context, the median milliseconds of each phase over 40 steps, of plain decoding and of
two trees, with the bundled model. Beside them stands attention alone: the same number of
queries against the same number of keys, with a mask of the same size built anew, times the
number of layers. The rounds over all contexts are interleaved.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer

from measure import machine
from token_recycling.accept import GreedyAcceptor
from token_recycling.api import TokenRecycling
from token_recycling.decode import decode
from token_recycling.files import write_atomically
from token_recycling.metrics import PHASES, Step
from token_recycling.prompts import DEMO
from token_recycling.stop import StopRules

CONTEXTS = (100, 450, 900, 1350, 1800)
ROUNDS, STEPS = 4, 10


def attention_alone(config: Any, queries: int, keys: int) -> float:
    """Milliseconds of building the mask and of attention in all layers."""
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    q = torch.randn(1, heads, queries, size)
    # each layer has its own: reading them from memory is part of the cost
    entries = torch.randn(config.num_hidden_layers, 2, 1, heads, keys, size)
    weights = torch.randn(8_000_000)  # the model's weights pass through the caches in between
    times = []
    with torch.inference_mode():
        for _ in range(15):
            weights.sum()
            begin = perf_counter()
            seen = torch.ones(1, queries, keys, dtype=torch.bool)
            mask = torch.zeros(1, 1, queries, keys).masked_fill_(~seen[:, None], -1e9)
            for k, v in entries:
                torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            times.append(1000 * (perf_counter() - begin))
    return median(times)


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    threads: Annotated[int, typer.Option(help="CPU threads.")] = os.cpu_count() or 1,
) -> None:
    """Measure, print a table and write all figures to OUT."""
    torch.set_num_threads(threads)
    first = TokenRecycling.from_pretrained(device="cpu", drafter="none")
    model, tokenizer = first.model, first.tokenizer
    recyclers = {"none": first} | {
        tree: TokenRecycling(model, tokenizer, tree=tree) for tree in ("small-16", "paper")
    }
    rng = random.Random(0)
    words = tokenizer(" ".join(DEMO), add_special_tokens=False).input_ids
    taken: dict[tuple[str, int], list[Step]] = {}
    for _ in range(ROUNDS):
        for context in CONTEXTS:
            prompt = [rng.choice(words) for _ in range(context)]
            for name, recycler in recyclers.items():
                rules = StopRules([10**6])
                steps = decode(recycler.target, recycler.drafter, GreedyAcceptor(), [prompt], rules)
                taken.setdefault((name, context), []).extend(
                    [next(steps) for _ in range(STEPS + 1)][1:]
                )
                steps.close()
    rows = []
    print("| decoder | context | nodes | forward ms | attention alone ms | all else ms |")
    print("|---|---|---|---|---|---|")
    for (name, context), found in taken.items():
        phases = {
            phase: 1000 * median(step.seconds[i] for step in found)
            for i, phase in enumerate(PHASES)
        }
        nodes = int(median(step.nodes for step in found))
        attention = attention_alone(model.config, nodes, context + nodes)
        row = {"decoder": name, "context": context, "nodes": nodes, "attention": attention}
        rows.append(row | {"milliseconds": phases})
        rest = sum(phases.values()) - phases["verify"]
        print(
            f"| {name} | {context} | {nodes} | {phases['verify']:.2f} | {attention:.2f} "
            f"| {rest:.2f} |"
        )
    result = {"machine": machine(), "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda partial: partial.write_text(json.dumps(result, indent=1) + "\n"))


if __name__ == "__main__":
    typer.run(main)

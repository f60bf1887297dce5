"""Times of a step by tokens verified, and to the first token, relative to those of ``generate``.

    python lab/steps.py steps MODEL [--context 300] [--dtype bfloat16] [--tokens 1,8,16]
    python lab/steps.py prompts MODEL --text TEXT [--lengths 1000,4000,8000]

Steps: a forward of the model with one token and Transformers' own cache, and ours with a chain of
tokens, in turn. Figures are medians, and quartiles of the ratios.
"""

from __future__ import annotations

import lzma
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from token_recycling import TokenRecycling
from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.drafting.templates import TreeShape, TreeTemplate
from token_recycling.util.machine import processor

app = typer.Typer()
ROUNDS = 15


def load(model: Path, dtype: str, threads: int) -> Any:
    """Load a model."""
    torch.set_num_threads(threads)
    print(f"{processor()}, {threads} threads, {dtype}")
    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()


def chain(tokens: int, vocabulary: int) -> DraftTree:
    """Return a chain of random tokens."""
    if tokens == 1:
        return root_only(torch.tensor([1]))
    shape = TreeShape(TreeTemplate.chain(tokens - 1), torch.device("cpu"))
    nodes = torch.randint(vocabulary, (1, tokens))
    return shape.draft(nodes, torch.ones_like(nodes, dtype=torch.bool))


def timed(run: Any) -> float:
    """Return the seconds of a call."""
    begin = perf_counter()
    run()
    return perf_counter() - begin


def ratios(ours: list[float], theirs: list[float]) -> str:
    """Describe the ratios of two series."""
    each = [a / b for a, b in zip(ours, theirs)]
    low, middle, high = quantiles(each, n=4) if len(each) > 1 else each * 3
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@app.command()
def steps(
    model: Path,
    context: int = 300,
    dtype: str = "float32",
    tokens: str = "1,2,4,8,12,16,32",
    threads: int = 2,
) -> None:
    """Time steps by tokens verified."""
    loaded = load(model, dtype, threads)
    target: Any = TokenRecycling(loaded, nodes=1).target
    torch.manual_seed(0)
    vocabulary = target.vocab_size
    ids = torch.randint(vocabulary, (1, context))
    drafts = {int(n): chain(int(n), vocabulary) for n in tokens.split(",")}
    times: dict[int, list[float]] = {n: [] for n in drafts}
    theirs = []
    last, position = torch.tensor([[1]]), torch.tensor([[context]])
    with torch.inference_mode():
        cache = DynamicCache(config=loaded.config)
        loaded(ids, past_key_values=cache, use_cache=True)
        target.prefill(ids.tolist())

        def plain() -> None:
            loaded(last, past_key_values=cache, use_cache=True, position_ids=position)
            cache.crop(-1)

        for draft in drafts.values():
            target.verify(draft)  # layers are recorded
        for _ in range(ROUNDS):
            theirs.append(timed(plain))
            for n, draft in drafts.items():
                times[n].append(timed(partial(target.verify, draft)))
    print(f"after {context} tokens, a step of generate takes {1e3 * median(theirs):.1f} ms")
    for n, found in times.items():
        print(f"{n:4} tokens {1e3 * median(found):7.1f} ms, c = {ratios(found, theirs)}")


@app.command()
def prompts(
    model: Path,
    text: Annotated[Path, typer.Option(help="an .xz file of text")],
    lengths: str = "1000,4000,8000",
    dtype: str = "float32",
    threads: int = 2,
    rounds: int = 5,
) -> None:
    """Time the first token."""
    loaded = load(model, dtype, threads)
    recycler = TokenRecycling(loaded)
    numbers = [int(n) for n in lengths.split(",")]
    with lzma.open(text, "rt", encoding="utf-8") as lines:
        tokens = AutoTokenizer.from_pretrained(model)(lines.read(8 * max(numbers)))["input_ids"]
    for n in numbers:
        ids = torch.tensor([tokens[:n]])
        about = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False}
        ours, theirs = [], []
        for _ in range(rounds):
            theirs.append(timed(partial(loaded.generate, ids, **about)))
            ours.append(timed(partial(recycler.generate, tokens[:n], max_new_tokens=1)))
        print(f"{n:5} tokens: generate {median(theirs):.2f} s, ours {ratios(ours, theirs)} of it")


if __name__ == "__main__":
    app()

"""`token-recycling demo`: built-in prompts, decoded with and without drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from token_recycling.cli import options as o
from token_recycling.cli import show
from token_recycling.cli.generate import as_prompt
from token_recycling.cli.interrupts import raising
from token_recycling.cli.progress import busy_shown
from token_recycling.errors import TokenRecyclingError

if TYPE_CHECKING:
    from token_recycling.bench.compare import Comparison

BUNDLED = "bundled"


@o.expanded(loading=("nodes", "graph", "threads"))
def demo(
    loading: o.Loading,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            help="A model, as for generate, or bundled; default: SmolLM2-135M-Instruct, "
            "fetched once (93 MB); the bundled model if it cannot be had.",
        ),
    ] = None,
    max_tokens: o.MaxTokens = 96,
) -> None:
    """Compare decoding with and without drafts.

    Answers eight prompts in both ways.

    Streams one answer first. Exits with code 1 if any output differs.
    """
    if max_tokens < 2:
        raise TokenRecyclingError("-n must be 2 or more")
    source = _fetched() if model is None else None if model == BUNDLED else model
    from token_recycling.bench.compare import compare
    from token_recycling.bench.measures import repeats
    from token_recycling.bench.prompts import CHAT, DEMO

    recycler = replace(loading, model=source, device="cpu").open()
    size = sum(weight.numel() for weight in recycler.model.parameters()) / 1e6
    kind = str(recycler.model.dtype).removeprefix("torch.")
    print(f"model: {source or 'the bundled model'} ({size:.1f} M parameters, {kind})")
    prompts = DEMO if source is None else CHAT
    print(f"> {prompts[0]}\n")
    show.legend()
    first = as_prompt(recycler, prompts[0], raw=False)
    show.stream(recycler.stream(first, max_new_tokens=max_tokens))
    recycler.reset()
    print(f"\n{'':38} plain  recycled  speedup   MAT  tokens\n{'':36} tokens/s")
    results = []
    for question in prompts:
        prompt = as_prompt(recycler, question, raw=False)
        result = compare(recycler, prompt, {"max_new_tokens": max_tokens}, rounds=1, warm_up=False)
        results.append(result)
        print(
            f"{question[:34]:34} {result.plain_tokens_per_second:9.1f} "
            f"{result.tokens_per_second:9.1f} "
            f"{result.speedup:7.2f}x {result.stats.mat:5.2f} {len(result.tokens):7}"
            f"{'' if result.identical else '  DIFFERENT'}"
            f"{'  repeats itself' if repeats(result.tokens) else ''}",
            flush=True,
        )
    print(f"\n{_summary(results)}")
    if not all(result.identical for result in results):
        raise SystemExit(1)


def _fetched() -> str | None:
    """Return the folder of the fetched model, or None with a line that says why there is none."""
    from token_recycling.checkpoint.fetch import MODEL, fetch_model

    try:
        with busy_shown(f"fetching {MODEL}, once"), raising():
            return str(fetch_model())
    except TokenRecyclingError as error:
        show.note(f"{error}; using the bundled model, which repeats itself more than a real one")
        return None


def _summary(results: list[Comparison]) -> str:
    """Return a few sentences on all prompts; speeds of those whose answers say something."""
    from token_recycling.bench.measures import quartiles, repeats

    identical = sum(result.identical for result in results)
    counted = [result for result in results if not repeats(result.tokens)] or results
    speedups = [result.speedup for result in counted]
    first, middle, third = quartiles(speedups)
    steps = sum(result.stats.steps for result in counted)
    mat = 1 + sum(result.stats.accepted for result in counted) / max(steps, 1)
    without = len(results) - len(counted)
    marked = f"{without} answer{'s' * (without > 1)} that repeat{'s' * (without == 1)} "
    marked += f"{'itself' if without == 1 else 'themselves'} left out"
    return (
        f"{identical} of {len(results)} outputs identical to model.generate. Speedup {middle:.2f}x "
        f"(median of {len(counted)} prompts; quartiles {first:.2f} and {third:.2f}), MAT {mat:.2f}"
        f"{'; ' + marked if without else ''}."
    )

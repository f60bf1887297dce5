"""`token-recycling demo`: the bundled model on built-in prompts, plain and recycled."""

from __future__ import annotations

from math import exp, log

from token_recycling import defaults
from token_recycling.cli import options as o
from token_recycling.cli import show
from token_recycling.cli.generate import as_prompt
from token_recycling.errors import TokenRecyclingError


def demo(
    max_tokens: o.MaxTokens = 150,
    tree: o.Tree = defaults.TREE,
    graph: o.Graph = None,
    warm: o.Warm = None,
    threads: o.Threads = None,
) -> None:
    """Compare plain and recycled decoding on eight prompts.

    Streams one answer first. Exits with code 1 if any output differs.
    """
    from token_recycling.bench.compare import compare
    from token_recycling.bench.prompts import DEMO

    loading = o.Loading(None, "cpu", None, tree, threads=threads, graph=graph, warm=warm)
    if max_tokens < 2:
        raise TokenRecyclingError("-n must be 2 or more")
    recycler = loading.open()
    options = {"max_new_tokens": max_tokens}
    print(f"> {DEMO[0]}\n")
    show.legend()
    show.stream(recycler.stream(as_prompt(recycler, DEMO[0], raw=False), **options))
    recycler.reset()
    print(f"\n{'':38} plain  recycled  speedup   MAT  tokens\n{'':36} tokens/s")
    results = []
    for question in DEMO:
        result = compare(recycler, as_prompt(recycler, question, raw=False), options)
        results.append(result)
        print(
            f"{question[:34]:34} {result.plain_tokens_per_second:9.1f} "
            f"{result.tokens_per_second:9.1f} "
            f"{result.speedup:7.2f}x {result.stats.mat:5.2f} {len(result.tokens):7}"
            f"{'' if result.identical else '  DIFFERENT'}",
            flush=True,
        )
    identical = sum(result.identical for result in results)
    mean = exp(sum(log(result.speedup) for result in results) / len(results))
    steps = sum(result.stats.steps for result in results)
    mat = 1 + sum(result.stats.accepted for result in results) / steps
    print(
        f"\n{identical} of {len(results)} outputs identical to model.generate; MAT {mat:.2f}; "
        f"speedup {mean:.2f}x (geometric mean of the {len(results)} prompts, tree "
        f"{recycler.template.name}, matrix of {recycler.matrix.nbytes} bytes)"
    )
    if identical < len(results):
        raise SystemExit(1)

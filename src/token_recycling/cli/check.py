"""`token-recycling check`: compare a model's text with plain decoding on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from token_recycling import defaults
from token_recycling.cli import options as o
from token_recycling.cli.generate import as_prompt
from token_recycling.errors import TokenRecyclingError

if TYPE_CHECKING:
    from token_recycling.bench.check import Result


@o.expanded(loading=o.loading_without("matrix", "cold"))
def check(
    loading: o.Loading,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Text file with one prompt per line.")
    ] = None,
    max_tokens: o.MaxTokens = defaults.MAX_NEW_TOKENS,
    raw: o.Raw = False,
    as_json: o.Json = False,
) -> None:
    """Check that drafts do not change the text.

    Compares recycled with plain decoding, prompt by prompt.

    Reports for every prompt whether the text is that of `generate` and, if not, by how much
    `generate` preferred its own token at the first difference. The verdict is `lossless`,
    `near-tie` (all differences are within the numerical noise of plain decoding itself between
    two kernels, which is common in half precision) or `WRONG` (exit code 1). Also reports
    whether the text is that of this package's own steps without drafts, which use the same
    kernels.
    """
    from token_recycling.bench.prompts import DEMO

    if max_tokens < 1:
        raise TokenRecyclingError("-n must be 1 or more")
    questions = DEMO if prompts is None else _read(prompts)
    recycler = loading.open()
    from token_recycling.bench import check as checking

    results = []
    for question, result in zip(
        questions,
        checking.check(recycler, (as_prompt(recycler, q, raw) for q in questions), max_tokens),
    ):
        results.append(result)
        if not as_json:
            print(f"{question[:40]!r:44} {_line(result)}", flush=True)
    verdict = checking.overall(results)
    same = sum(result.difference is None for result in results)
    if as_json:
        report = {
            "verdict": verdict,
            "identical": same,
            "same_steps": sum(result.same_steps for result in results),
            "batch_invariant": recycler.batch_invariant,
            "prompts": len(results),
        }
        print(json.dumps({**report, "results": [result.to_dict() for result in results]}))
    else:
        mat = recycler.stats.mat
        kind = str(recycler.model.dtype).removeprefix("torch.")
        print(
            f"{same} of {len(results)} answers identical ({kind}"
            f"{', float32 logits' if loading.float32_logits else ''}, MAT {mat:.2f}): {verdict}\n"
            f"{sum(result.same_steps for result in results)} of {len(results)} those of our own "
            f"steps without drafts{' (batch-invariant)' if recycler.batch_invariant else ''}"
        )
    if verdict == "WRONG":
        sys.exit(1)


def _read(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenRecyclingError(f"cannot read the prompts in {path}: {error}") from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise TokenRecyclingError(f"{path} contains no prompts")
    return prompts


def _line(result: Result) -> str:
    difference = result.difference
    if difference is None:
        return f"identical, {result.new_tokens} tokens"
    choice = "second choice" if difference.runner_up else "not the second choice"
    steps = "the same as" if result.same_steps else "not that of"
    return (
        f"differs after {difference.position} tokens: plain token {difference.plain_token} leads "
        f"{difference.token} ({choice}) by {difference.gap:.2g}; noise {result.noise:.2g}: "
        f"{result.verdict}; {steps} our own steps without drafts"
    )

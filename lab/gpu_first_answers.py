"""The first answers of processes on a GPU, with an empty cache of kernels and with a filled one.

python lab/gpu_first_answers.py OUT.json CHECKPOINT PROMPTS.json [--answers N] [--new-tokens N]
python lab/gpu_first_answers.py OUT.json --dry-run      on a CPU, with the bundled model

PROMPTS.json: a list of lists of token ids, of which none is asked twice. Every case is a process:

  from_pretrained, then batches of its rows, each answer to new prompts, until all are asked;
  then, in the same process, the same prompts without drafts, captured and warm.

The table shows the seconds of ``from_pretrained`` and of ``warm``, and tokens per second of the
first, the second and the last answers, relative to those without drafts. Texts are compared with
those without drafts. OUT.json is written after every case.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import perf_counter
from typing import Annotated, Any

import typer

from script import run, save
from token_recycling import TokenRecycling
from token_recycling.util.machine import device_name

# Rows and options; those with one cache follow each other, the first with an empty one.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (1, {}),
    "default again": (1, {}),
    "15 nodes": (1, {"nodes": 15}),
    "batches of 4": (4, {}),
    "batches of 16": (16, {}),
}
EMPTY = ("default", "batches of 4", "batches of 16")  # begin with an empty cache
FIRST = 10  # answers that must not be slower than plain decoding
NEAR = 0.95


def answers(
    recycler: Any, prompts: list[list[int]], rows: int, tokens: int
) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Answer prompts in batches; return figures per batch, and the texts."""
    figures, texts = [], []
    for first in range(0, len(prompts) - rows + 1, rows):
        begun = perf_counter()
        found = recycler.generate(prompts[first : first + rows], max_new_tokens=tokens)
        seconds = perf_counter() - begun
        figures.append(
            {
                "begun": begun,
                "tokens_per_second": sum(len(one.token_ids) for one in found) / seconds,
                "steps": max(one.stats.steps for one in found),
                "mat": sum(one.stats.mat for one in found) / rows,
            }
        )
        texts += [one.token_ids for one in found]
    return figures, texts


def child(case: str, checkpoint: str | None, prompts: list[list[int]], tokens: int) -> None:
    """Measure one case; print it as JSON."""
    rows, options = CASES[case]
    graph = {} if checkpoint else {"graph": True}
    begun = perf_counter()
    recycler = TokenRecycling.from_pretrained(checkpoint, **graph, **options)
    loaded = perf_counter()
    if rows > 1:
        recycler.warm([rows])
    warmed = perf_counter()
    figures, texts = answers(recycler, prompts, rows, tokens)
    for one in figures:
        one["begun"] -= loaded
    plain = TokenRecycling(recycler.model, recycler.tokenizer, drafter="none", **graph)
    plain.warm([rows])
    answers(plain, prompts[:rows], rows, tokens)
    expected, right = answers(plain, prompts, rows, tokens)
    found = {
        "case": case,
        "device": device_name(recycler.target.device),
        "loading_seconds": loaded - begun,
        "warm_seconds": warmed - loaded,
        "batch_invariant": recycler.batch_invariant,
        "answers": figures,
        "plain": expected,
        "same_texts": sum(map(list.__eq__, texts, right)),
        "texts": len(texts),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # nothing that is still being compiled is waited for


def line(found: dict[str, Any]) -> str:
    """Return a row of the table."""
    plain = median(one["tokens_per_second"] for one in found["plain"])
    speeds = [one["tokens_per_second"] / plain for one in found["answers"]]
    full = median(speeds[len(speeds) // 2 :])
    slow = sum(speed < NEAR for speed in speeds[:FIRST])
    return (
        f"{found['case']:14} {found['loading_seconds']:7.1f} {found['warm_seconds']:5.1f} "
        f"{plain:7.0f} {speeds[0]:6.2f} {min(speeds[:FIRST]):6.2f} {slow:4} {full:6.2f} "
        f"{found['same_texts']:4} of {found['texts']}"
    )


def main(
    out: Path,
    checkpoint: Annotated[str | None, typer.Argument()] = None,
    prompts: Annotated[Path | None, typer.Argument()] = None,
    count: Annotated[int, typer.Option("--answers")] = 14,
    new_tokens: int = 96,
    dry_run: bool = False,
    case: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run all cases, or one as a child."""
    if dry_run:
        count, new_tokens = 2, 8
        asked = [[1, 5 + n % 50, 7, 9 + n % 7, 30, 11 + n % 11] for n in range(64)]
    elif prompts is None or not prompts.is_file():
        raise typer.BadParameter("give a checkpoint and the file of its prompts, or --dry-run")
    else:
        asked = json.loads(prompts.read_text())
    if case:
        child(case, checkpoint, asked[: count * CASES[case][0]], new_tokens)
    print(f"{'case':14} {'loading':>7} {'warm':>5} {'plain':>7} {'first':>6} {'worst':>6} ", end="")
    print(f"{'slow':>4} {'full':>6} same texts", flush=True)
    results: list[Any] = []
    cache = mkdtemp()
    for name in CASES:
        if name in EMPTY:
            shutil.rmtree(cache)
            cache = mkdtemp()
        process = subprocess.run(
            [sys.executable, *sys.argv, "--case", name],
            capture_output=True,
            text=True,
            env=os.environ | {"TRITON_CACHE_DIR": cache},
        )
        if process.returncode:
            print(f"{name}: {process.stderr.strip().splitlines()[-1:]}", flush=True)
            continue
        results.append(json.loads(process.stdout.splitlines()[-1]))
        save(out, results)
        print(line(results[-1]), flush=True)
    raise typer.Exit(len(CASES) - len(results))


if __name__ == "__main__":
    run(main)

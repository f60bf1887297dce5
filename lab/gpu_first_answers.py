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

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

# Name, rows, options; those with one cache follow each other, the first with an empty one.
CASES: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("default", 1, {}),
    ("default again", 1, {}),
    ("15 nodes", 1, {"nodes": 15}),
    ("batches of 4", 4, {}),
    ("batches of 16", 16, {}),
)
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
        emitted = sum(len(one.token_ids) for one in found)
        figures.append(
            {
                "begun": begun,
                "tokens_per_second": emitted / seconds,
                "steps": max(one.stats.steps for one in found),
                "mat": sum(one.stats.mat for one in found) / rows,
            }
        )
        texts += [one.token_ids for one in found]
    return figures, texts


def child(arguments: argparse.Namespace) -> None:
    """Measure one case; print it as JSON."""
    import torch

    from token_recycling import TokenRecycling

    _, rows, options = next(case for case in CASES if case[0] == arguments.case)
    prompts = json.loads(arguments.prompts.read_text())[: arguments.answers * rows]
    graph = {"graph": True} if arguments.dry_run else {}
    begun = perf_counter()
    recycler = TokenRecycling.from_pretrained(arguments.checkpoint, **graph, **options)
    loaded = perf_counter()
    if rows > 1:
        recycler.warm([rows])
    warmed = perf_counter()
    figures, texts = answers(recycler, prompts, rows, arguments.new_tokens)
    for one in figures:
        one["begun"] -= loaded
    plain = TokenRecycling(recycler.model, recycler.tokenizer, drafter="none", **graph)
    plain.warm([rows])
    answers(plain, prompts[:rows], rows, arguments.new_tokens)
    expected, right = answers(plain, prompts, rows, arguments.new_tokens)
    found = {
        "case": arguments.case,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
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


def main() -> int:
    """Run all cases, or one as a child."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("prompts", nargs="?", type=Path)
    parser.add_argument("--answers", type=int, default=14)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.dry_run or (arguments.prompts and arguments.prompts.is_file())):
        parser.error("give a checkpoint and the file of its prompts, or --dry-run")
    if arguments.dry_run and arguments.prompts is None:
        arguments.answers, arguments.new_tokens = 2, 8
        arguments.prompts = Path(mkdtemp()) / "prompts.json"
        asked = [[1, 5 + n % 50, 7, 9 + n % 7, 30, 11 + n % 11] for n in range(64)]
        arguments.prompts.write_text(json.dumps(asked))
    if arguments.case:
        child(arguments)
    print(f"{'case':14} {'loading':>7} {'warm':>5} {'plain':>7} {'first':>6} {'worst':>6} ", end="")
    print(f"{'slow':>4} {'full':>6} same texts", flush=True)
    results, failed = [], 0
    cache = Path(mkdtemp())
    for name, _, _ in CASES:
        if name in EMPTY:
            shutil.rmtree(cache)
            cache = Path(mkdtemp())
        command = [sys.executable, __file__, str(arguments.out)]
        command += [arguments.checkpoint] if arguments.checkpoint else []
        if arguments.checkpoint:
            command.append(str(arguments.prompts))
        command += ["--case", name, "--answers", str(arguments.answers)]
        command += ["--new-tokens", str(arguments.new_tokens)]
        command += ["--dry-run"] if arguments.dry_run else []
        environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
        process = subprocess.run(command, capture_output=True, text=True, env=environment)
        if process.returncode:
            failed += 1
            print(f"{name}: {process.stderr.strip().splitlines()[-1:]}", flush=True)
            continue
        results.append(json.loads(process.stdout.splitlines()[-1]))
        arguments.out.write_text(json.dumps(results, indent=1))
        print(line(results[-1]), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())

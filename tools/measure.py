"""Measure every tree against ``model.generate`` and its prompt lookup, side by side.

    python tools/measure.py --data ../shared/data --out bench/results/cpu.json

40 GSM8K test questions and 40 first turns of Spec-Bench's other kinds, greedy, up to 200 new
tokens. All decoders take turns on every prompt in one process, in an order that rotates from
prompt to prompt. Every tree keeps its own matrix from prompt to prompt (hot start); the
warm-up prompts are not among the measured ones and leave nothing in the matrices. Times are of
the whole call, prefill included.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.progress import Progress

from token_recycling.api import TokenRecycling
from token_recycling.compare import plain_generate, timed
from token_recycling.files import write_atomically
from token_recycling.metrics import PHASES
from token_recycling.prompts import DEMO
from token_recycling.tree import shipped

BASELINE, LOOKUP = "model.generate", "model.generate, prompt_lookup_num_tokens=10"


def read_questions(data: Path, each: int) -> list[tuple[str, str]]:
    """(id, text) of the measured prompts."""
    maths = [json.loads(x) for x in (data / "gsm8k_test.jsonl").read_text().splitlines()]
    rows = [json.loads(x) for x in (data / "spec_bench/question.jsonl").read_text().splitlines()]
    others = [r for r in rows if r["category"] != "math_reasoning" and len(r["turns"][0]) < 4000]
    others = others[:: max(1, len(others) // each)][:each]
    return [
        *((f"gsm8k-test-{i}", row["question"]) for i, row in enumerate(maths[:each])),
        *((f"spec-bench-{r['question_id']}-{r['category']}", r["turns"][0]) for r in others),
    ]


def summarise(runs: dict[str, list[dict[str, Any]]], kinds: list[str]) -> dict[str, Any]:
    """Speedups of every decoder over the baseline, in all and by kind of prompt."""

    def speed(run: dict[str, Any]) -> float:
        return float(run["tokens"] / run["seconds"])

    table = {}
    for name, rows in runs.items():
        ratios = [speed(row) / speed(base) for row, base in zip(rows, runs[BASELINE])]
        low, _, high = quantiles(ratios, n=4)
        result: dict[str, Any] = {
            "tokens_per_second": median(map(speed, rows)),
            "speedup_of_medians": median(map(speed, rows)) / median(map(speed, runs[BASELINE])),
            "speedup_per_prompt_quartiles": [low, median(ratios), high],
            "speedup_of_totals": (sum(r["tokens"] for r in rows) / sum(r["seconds"] for r in rows))
            / (
                sum(r["tokens"] for r in runs[BASELINE]) / sum(r["seconds"] for r in runs[BASELINE])
            ),
            "identical": sum(row["identical"] for row in rows) / len(rows),
        }
        for kind in ("gsm8k", "spec-bench"):
            result[f"median_speedup_{kind}"] = median(
                ratio for ratio, k in zip(ratios, kinds) if k == kind
            )
        result["slower_than_baseline"] = sum(ratio < 1 for ratio in ratios)
        if "steps" in rows[0]:
            steps = sum(row["steps"] for row in rows)
            result["mat"] = 1 + sum(row["accepted"] for row in rows) / steps
            total = sum(sum(row["phases"].values()) for row in rows)
            for phase in PHASES:
                result[f"share_{phase}"] = sum(row["phases"][phase] for row in rows) / total
            result["share_outside_forward"] = 1 - result["share_verify"]
        table[name] = result
    return table


def machine() -> dict[str, Any]:
    """What this was measured on."""
    cpu = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x][:1]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    return {
        "cpu": cpu[0].split(": ")[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit.strip(),
        "command": " ".join(["python", *sys.argv]),
    }


def main(
    data: Annotated[Path, typer.Option(help="Folder with gsm8k_test.jsonl and spec_bench.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    each: Annotated[int, typer.Option(help="Prompts of each of the two kinds.")] = 40,
    tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 200,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint; left out: the bundled one.")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = os.cpu_count() or 1,
) -> None:
    """Measure, print a table and write all figures to OUT."""
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    first = TokenRecycling.from_pretrained(model, device="cpu")
    recyclers = {
        name: TokenRecycling(first.model, first.tokenizer, tree=name) for name in shipped()
    }
    for drafter in ("none", "prompt-lookup"):
        recyclers[drafter] = TokenRecycling(first.model, first.tokenizer, drafter=drafter)
    decoders = [BASELINE, LOOKUP, *recyclers]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in decoders}

    def decode_by(name: str, question: str) -> dict[str, Any]:
        prompt = [{"role": "user", "content": question}]
        options: dict[str, Any] = {"max_new_tokens": tokens}
        if name in recyclers:
            answer, seconds = timed(
                lambda: recyclers[name].generate(prompt, **options), first.target.device
            )
            phases = {phase: answer.stats.seconds[phase] for phase in PHASES}
            about = {"steps": answer.stats.steps, "accepted": answer.stats.accepted}
            return {"ids": answer.token_ids, "seconds": seconds, "phases": phases, **about}
        if name == LOOKUP:
            options["prompt_lookup_num_tokens"] = 10
        ids, seconds = timed(lambda: plain_generate(first, prompt, options), first.target.device)
        return {"ids": ids, "seconds": seconds}

    for name in decoders:
        decode_by(name, DEMO[0])
    for recycler in recyclers.values():
        recycler.reset()
    questions = read_questions(data, each)
    with Progress() as progress:
        task = progress.add_task("measuring", total=len(questions))
        for index, (_, question) in enumerate(questions):
            turn = index % len(decoders)
            found = {name: decode_by(name, question) for name in decoders[turn:] + decoders[:turn]}
            expected = found[BASELINE]["ids"]
            for name, run in found.items():
                ids = run.pop("ids")
                runs[name].append({**run, "tokens": len(ids), "identical": ids == expected})
            progress.advance(task)
    kinds = ["gsm8k" if name.startswith("gsm8k") else "spec-bench" for name, _ in questions]
    table = summarise(runs, kinds)
    result = {
        "machine": machine(),
        "protocol": " ".join((__doc__ or "").split("\n\n")[2].split()),
        "prompts": [name for name, _ in questions],
        "table": table,
        "runs": runs,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda partial: partial.write_text(json.dumps(result, indent=1) + "\n"))
    print("| decoder | tokens/s | speedup | per prompt (quartiles) | GSM8K | others | MAT | same |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in table.items():
        low, middle, high = row["speedup_per_prompt_quartiles"]
        print(
            f"| {name} | {row['tokens_per_second']:.1f} | {row['speedup_of_medians']:.2f} "
            f"| {low:.2f} / {middle:.2f} / {high:.2f} | {row['median_speedup_gsm8k']:.2f} "
            f"| {row['median_speedup_spec-bench']:.2f} | {row.get('mat', 0):.2f} "
            f"| {row['identical']:.0%} |"
        )


if __name__ == "__main__":
    typer.run(main)

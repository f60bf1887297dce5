"""The questions that figures are made from, in two halves: constants are fitted on the first.

    python lab/questions.py --data ../shared/data --out questions.jsonl

writes them as a suite for ``token-recycling bench``: the first turns, with the category as kind.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from script import run
from token_recycling.bench.suites import Question, load

SPEC_BENCH, OTHERS = 6, 20  # questions per kind of Spec-Bench, and of GSM8K and MBPP
FIT, CHECK = 0, 1  # halves


def questions(data: Path, per_kind: int = SPEC_BENCH, others: int = OTHERS) -> list[Question]:
    """Return questions of Spec-Bench's 13 categories, GSM8K and MBPP, alternating between kinds.

    Those of a kind are spread evenly over its file. ``Question.category`` is the kind.
    """
    groups: list[list[Question]] = []
    by_category: dict[str, list[Question]] = {}
    for question in load(f"spec-bench={data / 'spec_bench' / 'question.jsonl'}"):
        by_category.setdefault(question.category, []).append(question)
    groups += [spread(group, per_kind) for group in by_category.values()]
    groups += [
        spread(load(f"{name}={data / file}"), others)
        for name, file in (("gsm8k", "gsm8k_test.jsonl"), ("mbpp", "mbpp/question.jsonl"))
    ]
    longest = max(map(len, groups))
    return [group[i] for i in range(longest) for group in groups if i < len(group)]


def half(asked: list[Any], which: int) -> list[Any]:
    """Return every second question, or recorded answer, of each kind: ``FIT`` or ``CHECK``."""
    seen = Counter[str]()
    chosen = []
    for one in asked:
        if seen[one.category] % 2 == which:
            chosen.append(one)
        seen[one.category] += 1
    return chosen


def spread(group: list[Question], number: int) -> list[Question]:
    """Return ``number`` questions spread evenly over ``group``."""
    count = min(number, len(group))
    return [group[i * len(group) // count] for i in range(count)]


def main(
    data: Annotated[Path, typer.Option(help="Folder of the question files.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    per_kind: Annotated[int, typer.Option(help="Questions per kind of Spec-Bench.")] = SPEC_BENCH,
    others: Annotated[int, typer.Option(help="Questions of GSM8K and of MBPP.")] = OTHERS,
) -> None:
    """Write the questions as JSONL."""
    rows = [
        {"id": one.name, "kind": one.category, "prompt": one.turns[0]}
        for one in questions(data, per_kind, others)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    run(main)

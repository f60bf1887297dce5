"""Benchmark report: one self-contained HTML document."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from token_recycling.bench import plots, tables
from token_recycling.util.files import write_text

SHOWN = 12  # losing prompts shown; the others are collapsed


def render(summary: dict[str, Any]) -> str:
    """Return the HTML report of a benchmark's ``summary`` (see ``summary.summarise``)."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    losing = tables.losing(summary)
    return environment.get_template("report.html.j2").render(
        summary,
        model=summary["model"]["name"],
        headline=tables.headline(summary),
        subject=tables.subject(summary),
        overall=tables.overall(summary),
        by_kind=tables.by_kind(summary),
        plots=plots.plots(summary),
        depths=tables.depths(summary),
        phases=tables.phases(summary),
        spec_bench=tables.spec_bench(summary),
        losing=losing._replace(rows=losing.rows[:SHOWN]),
        more_losing=losing._replace(rows=losing.rows[SHOWN:]),
        sample=_sample(summary["sample"]),
        conditions={part: _facts(summary[part]) for part in ("machine", "model", "settings")},
        prompts=_prompts(summary["questions"]),
    )


def write(summary: dict[str, Any], path: Path) -> None:
    """Write the HTML report of ``summary`` to ``path``.

    Raises:
        TokenRecyclingError: the file cannot be written.
    """
    write_text(path, render(summary))


def _sample(sample: dict[str, Any] | None) -> dict[str, Any] | None:
    """Join adjacent pieces of the sample text that are both drafted or both not."""
    if sample is None:
        return None
    pieces = sample["pieces"]
    runs = groupby(pieces, key=lambda piece: piece[1])
    return {
        **sample,
        "accepted": sum(drafted for _, drafted in pieces),
        "tokens": len(pieces),
        "runs": [("".join(text for text, _ in run), drafted) for drafted, run in runs],
    }


def _facts(part: dict[str, Any]) -> dict[str, str]:
    """Return a part of the summary as texts."""
    facts = {}
    for key, value in part.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        if key.endswith("_bytes"):
            key, text = key.removesuffix("_bytes"), tables.mebibytes(value)
        facts[key.replace("_", " ")] = tables.NOTHING if value in (None, "", []) else text
    return facts


def _prompts(questions: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the prompts by kind."""
    kinds: dict[str, list[str]] = {}
    for question in questions:
        kinds.setdefault(question["kind"], []).append(question["name"])
    return kinds

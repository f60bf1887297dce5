"""Tables of a summary, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = list[str]


def _mebibytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:.1f} MiB"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


# column title -> function from a decoder's summary entry to its cell
OVERALL: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s": lambda d: f"{d['overall']['tokens_per_second']:.1f}",
    "speedup": lambda d: f"{d['overall']['speedup']:.2f}x",
    "95 %": lambda d: "{:.2f}–{:.2f}".format(*d["overall"]["speedup_interval"]),
    "rounds ±": lambda d: "–" if d["spread"] is None else f"{d['spread']:.1%}",
    "quartiles": lambda d: "{:.2f} / {:.2f} / {:.2f}".format(*d["overall"]["speedup_quartiles"]),
    "slower on": lambda d: f"{d['overall']['slower_than_baseline']} of {d['overall']['questions']}",
    "MAT": lambda d: f"{d['overall']['mat']:.2f}",
    "c": lambda d: f"{d['overall']['c']:.2f}",
    "tokens a step": lambda d: _number(d["overall"]["nodes"]),
    "first token": lambda d: f"{d['overall']['ttft_seconds'] * 1e3:.0f} ms",
    "same text": lambda d: f"{d['overall']['identical']:.0%}",
    "matrix": lambda d: _mebibytes(d["matrix_bytes"]),
    "peak memory": lambda d: _mebibytes(d["peak_memory_bytes"]),
}


def overall(summary: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Return titles and rows: one row per decoder, over all questions."""
    rows = [
        [name, *(cell(entry) for cell in OVERALL.values())]
        for name, entry in summary["decoders"].items()
    ]
    return ["decoder", *OVERALL], rows


def by_kind(summary: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Return titles and rows: per kind the speedup of every decoder but the first baseline."""
    names = [name for name in summary["decoders"] if name != summary["baseline"]]
    rows = []
    for kind in summary["kinds"]:
        entries = [summary["decoders"][name]["kinds"][kind] for name in names]
        questions = str(summary["decoders"][summary["baseline"]]["kinds"][kind]["questions"])
        rows.append([kind, questions, *(f"{entry['speedup']:.2f}x" for entry in entries)])
    return ["kind", "questions", *names], rows


def spec_bench(summary: dict[str, Any]) -> tuple[Row, list[Row]]:
    """Return titles and rows of Spec-Bench's aggregate."""
    rows = []
    for name, entry in summary["decoders"].items():
        found = entry["overall"]["spec_bench"]
        speed, ratio = found["tokens_per_second"], found["speedup"]
        rows.append([name, f"{speed:.1f}", f"{ratio:.2f}x", f"{found['mat']:.2f}"])
    return ["Spec-Bench's aggregate", "mean tokens/s", "speedup", "MAT"], rows


def markdown(table: tuple[Row, list[Row]]) -> str:
    """Return a table as Markdown."""
    titles, rows = table
    lines = [titles, ["---"] * len(titles), *rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def document(summary: dict[str, Any]) -> str:
    """Return all tables as one Markdown text, headed by the command that produced them."""
    machine, model = summary["machine"], summary["model"]
    note = f", {model['note']}" if model["note"] else ""
    head = (
        f"`{machine['command']}`\n\n{model['name']}{note}: {model['parameters'] / 1e6:.1f} M "
        f"parameters, {model['dtype']}; {machine['device_name']}, {machine['threads']} threads; "
        f"torch {machine['torch']}, transformers {machine['transformers']}; {summary['date']}\n"
    )
    return "\n".join([head, *(markdown(make(summary)) for make in (overall, by_kind, spec_bench))])

"""Tables of a summary, for the terminal, as Markdown and for the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from token_recycling.bench.variants import AUTO, NOT_RECYCLED
from token_recycling.decoding.metrics import PHASES

NOTHING = "–"
FEW = 20  # questions, below which the headline warns


class Table(NamedTuple):
    """A table of texts; the first cell of every row is the row's header."""

    columns: list[str]
    rows: list[list[str]]

    def only(self, *columns: str) -> Table:
        """Return the first column and those whose titles begin with these words."""
        titles = [column.partition(" (")[0] for column in self.columns]
        indices = [0, *map(titles.index, columns)]
        return Table(
            [self.columns[i] for i in indices], [[row[i] for i in indices] for row in self.rows]
        )


def mebibytes(count: int | None) -> str:
    """Format a number of bytes."""
    return NOTHING if count is None else f"{count / 2**20:.1f} MiB"


def percent(fraction: float | None) -> str:
    """Format a fraction, rounded down: 100 % means all."""
    return NOTHING if fraction is None else f"{int(1000 * fraction + 1e-6) / 10:g} %"


def _of_several(entry: dict[str, Any], form: str, name: str) -> str:
    """Format figures that need more than one question."""
    overall = entry["overall"]
    return form.format(*overall[name]) if overall["questions"] > 1 else NOTHING


# column title -> function from a decoder's summary entry to its cell
OVERALL: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens/s": lambda d: f"{d['overall']['tokens_per_second']:.1f}",
    "speedup": lambda d: f"{d['overall']['speedup']:.2f}x",
    "95 %": lambda d: _of_several(d, "{:.2f}–{:.2f}", "speedup_interval"),
    "rounds ±": lambda d: NOTHING if d["spread"] is None else f"{d['spread']:.1%}",
    "quartiles": lambda d: _of_several(d, "{:.2f} / {:.2f} / {:.2f}", "speedup_quartiles"),
    "slower on": lambda d: f"{d['overall']['slower_than_baseline']} of {d['overall']['questions']}",
    "MAT": lambda d: f"{d['overall']['mat']:.2f}",
    "forwards": lambda d: str(d["overall"]["forwards"]),
    "c": lambda d: NOTHING if d["overall"]["c"] is None else f"{d['overall']['c']:.2f}",
    "tokens a step": lambda d: (
        NOTHING if d["overall"]["size"] is None else f"{d['overall']['size']:.1f}"
    ),
    "first token": lambda d: f"{d['overall']['ttft_seconds'] * 1e3:.0f} ms",
    "same text": lambda d: percent(d["overall"]["identical"]),
    "matrix": lambda d: mebibytes(d["matrix_bytes"]),
    "peak memory": lambda d: mebibytes(d["peak_memory_bytes"]),
}
NARROW = ("tokens/s", "speedup", "quartiles", "slower on", "MAT", "same text")  # fits 80 columns


def overall(summary: dict[str, Any]) -> Table:
    """Return one row per decoder, over all questions."""
    rows = [
        [name, *(cell(entry) for cell in OVERALL.values())]
        for name, entry in summary["decoders"].items()
    ]
    titles = [f"c ({summary['reference']})" if title == "c" else title for title in OVERALL]
    return Table(["decoder", *titles], rows)


def headline(summary: dict[str, Any]) -> str:
    """Return one paragraph on the default, or the fastest recycled decoder, faster or not."""
    decoders, baseline = summary["decoders"], summary["baseline"]
    recycled = [
        name for name in compared(summary) if decoders[name]["about"]["drafter"] not in NOT_RECYCLED
    ]
    if not recycled:
        return f"No recycled decoder was compared with {baseline}."
    best = max(recycled, key=lambda name: float(decoders[name]["overall"]["speedup"]))
    name = AUTO if AUTO in recycled else best
    overall, repeating = decoders[name]["overall"], len(summary["repeating"])
    count, (low, high) = overall["questions"], overall["speedup_interval"]
    first, _, third = overall["speedup_quartiles"]
    verdict = "" if low > 1 else ": slower" if high < 1 else ": no clear difference"
    model = Path(summary["model"]["name"]).name
    spread = f"median of {count} questions; quartiles {first:.2f} and {third:.2f}"
    spread += f"; 95 % interval {low:.2f} to {high:.2f}"
    if count == 1:
        spread, verdict = "one question", ""
    fastest = f"The fastest of {len(recycled)} recycled decoders"
    which = "The default" if name == AUTO else fastest
    text = (
        f"{model}: {which} ({name}) decodes {overall['speedup']:.2f} times as fast as {baseline} "
        f"({spread}){verdict}. It is slower on "
        f"{overall['slower_than_baseline']} of them, and {percent(overall['identical'])} of its "
        f"answers are those of {baseline}."
    )
    asked = len(summary["questions"])
    if repeating == asked:
        text += " All answers only repeat themselves: this says nothing about other text."
    elif repeating:
        text += (
            f" {repeating} of {asked} questions are not counted: their answers repeat themselves."
        )
    if count < FEW:
        text += " So few questions say little about others."
    return text


def compared(summary: dict[str, Any]) -> list[str]:
    """Return the names of the decoders other than the baseline."""
    return [name for name in summary["decoders"] if name != summary["baseline"]]


def by_kind(summary: dict[str, Any]) -> Table:
    """Return per kind the speedup of every decoder that is compared."""
    names = compared(summary)
    rows = []
    for kind in summary["kinds"]:
        entries = [summary["decoders"][name]["kinds"][kind] for name in names]
        questions = str(summary["decoders"][summary["baseline"]]["kinds"][kind]["questions"])
        rows.append([kind, questions, *(f"{entry['speedup']:.2f}x" for entry in entries)])
    return Table(["kind", "questions", *names], rows)


def depths(summary: dict[str, Any]) -> Table:
    """Return the share of steps that accepted at least 1, 2, … drafted tokens."""
    shares = {
        name: [percent(share) for share in entry["overall"]["accepted_per_depth"]]
        for name, entry in summary["decoders"].items()
    }
    deepest = max(map(len, shares.values()))
    rows = [[name, *row, *[NOTHING] * (deepest - len(row))] for name, row in shares.items() if row]
    return Table(["decoder", *map(str, range(1, deepest + 1))], rows)


def phases(summary: dict[str, Any]) -> Table:
    """Return the share of the time of steps by phase."""
    rows = [
        [name, *(percent(shares[phase]) for phase in PHASES)]
        for name, entry in summary["decoders"].items()
        if (shares := entry["overall"]["phases"])
    ]
    return Table(["decoder", *PHASES], rows)


def spec_bench(summary: dict[str, Any]) -> Table:
    """Return Spec-Bench's aggregate."""
    rows = []
    for name, entry in summary["decoders"].items():
        aggregate = entry["spec_bench"]
        speed, ratio = aggregate["tokens_per_second"], aggregate["speedup"]
        rows.append([name, f"{speed:.1f}", f"{ratio:.2f}x", f"{aggregate['mat']:.2f}"])
    return Table(["Spec-Bench's aggregate", "mean tokens/s", "speedup", "MAT"], rows)


def losing(summary: dict[str, Any]) -> Table:
    """Return the questions that a decoder answered more slowly than the baseline."""
    rows = [
        [
            question["name"],
            f"{question['speedup']:.2f}x",
            f"{question['mat']:.2f}",
            str(question["tokens"]),
            *(question[key] for key in ("kind", "decoder", "prompt")),
        ]
        for question in summary["losing"]
    ]
    return Table(["prompt", "speedup", "MAT", "tokens", "kind", "decoder", "begins with"], rows)


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def document(summary: dict[str, Any]) -> str:
    """Return the main tables as one Markdown text, headed by the command that produced them."""
    head = f"`{summary['machine']['command']}`\n\n{subject(summary)}; {summary['date']}\n"
    return "\n".join([head, *(markdown(make(summary)) for make in (overall, by_kind, spec_bench))])


def subject(summary: dict[str, Any]) -> str:
    """Return a line with the model and the machine that were measured, and whether to the end."""
    machine, model = summary["machine"], summary["model"]
    answered, asked = len(summary["questions"]), summary["asked"]
    end = f"; interrupted after {answered} of {asked} questions" if answered < asked else ""
    note = f", {model['note']}" if model["note"] else ""
    return (
        f"{model['name']}{note}: {model['parameters'] / 1e6:.1f} M parameters, {model['dtype']}; "
        f"{machine['device_name']}, {machine['threads']} thread{'s' * (machine['threads'] != 1)}; "
        f"torch {machine['torch']}, transformers {machine['transformers']}{end}"
    )

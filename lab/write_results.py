"""Write docs/results.md from the summaries in lab/results and the text in results.md.j2.

python lab/write_results.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from token_recycling.bench import tables
from token_recycling.bench.tables import Table
from token_recycling.util.files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "lab" / "results"


def load(name: str) -> dict[str, Any]:
    """The summary of a run."""
    summary: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return summary


def command(name: str) -> str:
    """The command line of a run, with its machine."""
    summary = load(name)
    machine, model = summary["machine"], summary["model"]
    words = machine["command"]
    shape = f", {model['note']}" if model["note"] else ""
    sets = f" with {', '.join(machine['instructions'])}" if machine.get("instructions") else ""
    return (
        f"`{words}`\n({len(summary['questions'])} questions; {model['parameters'] / 1e6:.1f} M "
        f"parameters{shape}, {model['dtype']}; {machine['device_name']}{sets}, "
        f"{machine['threads']} threads; torch {machine['torch']}, "
        f"transformers {machine['transformers']}; "
        f"{summary['date'][:10]}, commit {machine['commit'][:7]})\n"
    )


def overall(name: str, columns: tuple[str, ...]) -> str:
    """Decoder by decoder, all questions."""
    return tables.markdown(tables.overall(load(name)).only(*columns[1:]))


def kinds(name: str) -> str:
    """Kind by kind: the speedups of some decoders, and their MAT."""
    decoders, summary = ("none", "prompt-lookup", "paper", "auto"), load(name)
    titles, rows = tables.by_kind(summary)
    places = [titles.index(title) for title in ("kind", "questions", *decoders)]
    rows = [
        [row[i] for i in places]
        + [f"{summary['decoders'][one]['kinds'][row[0]]['mat']:.2f}" for one in decoders[2:]]
        for row in rows
    ]
    titles = [*(titles[i] for i in places), *(f"MAT {decoder}" for decoder in decoders[2:])]
    return tables.markdown(Table(titles, rows))


def settings(names: dict[str, str]) -> str:
    """Several runs: ``generate``, the loop without drafts and the default."""
    rows = []
    for name, title in names.items():
        if not (RESULTS / f"{name}.json").exists():
            continue  # some need a processor that not all machines have
        found = load(name)["decoders"]
        auto = next(e for n, e in found.items() if n.startswith("auto"))["overall"]
        quartiles = "{:.2f} to {:.2f}".format(*auto["speedup_quartiles"][::2])
        rows.append(
            [
                *(title, str(auto["questions"])),
                f"{found['generate']['overall']['tokens_per_second']:.1f}",
                f"{found['none']['overall']['speedup']:.2f}x",
                f"{auto['speedup']:.2f}x ({quartiles})",
                *(f"{auto['mat']:.2f}", tables.percent(auto["identical"])),
            ]
        )
    titles = ["", "questions", "`generate`, tokens/s", "none", "auto (quartiles)", "MAT"]
    return tables.markdown(Table([*titles, "same text"], rows))


def slowest(name: str, decoder: str, count: int) -> str:
    """The questions that a decoder answered slowest in relation to generate."""
    summary = load(name)
    own, plain = (summary["per_question"][one] for one in (decoder, "generate"))
    found = sorted(
        (a["tokens_per_second"] / b["tokens_per_second"], one["id"], one["kind"], a["tokens"])
        for one, a, b in zip(summary["questions"], own, plain)
    )
    rows = [[id_, kind, str(n), f"{ratio:.2f}x"] for ratio, id_, kind, n in found[:count]]
    titles = ["question", "kind", "tokens", f"speedup of {decoder}"]
    return tables.markdown(Table(titles, rows))


def served(name: str) -> str:
    """Tokens per second of the servers, by requests at once: median and range of the rounds."""
    found = load(name)["side_by_side"]
    servers = list(dict.fromkeys(key.rpartition(" at ")[0] for key in found))
    at_once = list(dict.fromkeys(key.rpartition(" at ")[2] for key in found))

    def cell(server: str, number: str) -> str:
        speeds = [one["tokens_per_second"] for one in found[f"{server} at {number}"]]
        return f"{median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})"

    rows = [[server, *(cell(server, number) for number in at_once)] for server in servers]
    titles = ["server", *(f"{number} at once" for number in at_once)]
    return tables.markdown(Table(titles, rows))


def render() -> str:
    """Return the text with all figures."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    functions = (load, command, overall, kinds, settings, slowest, served)
    environment.globals["demo"] = (RESULTS / "demo.txt").read_text("utf-8")
    environment.globals.update({function.__name__: function for function in functions})
    return environment.get_template("results.md.j2").render()


if __name__ == "__main__":
    write_text(ROOT / "docs" / "results.md", render())

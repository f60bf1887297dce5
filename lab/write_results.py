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
    # An option of earlier runs, which is gone: what it asked for is what happens now.
    words = machine["command"].replace(" --resume", "").replace(" --no-tune", "")
    shape = f", {model['note']}" if model["note"] else ""
    sets = f" with {', '.join(machine['instructions'])}" if machine.get("instructions") else ""
    return (
        f"`{words}`\n({len(summary['questions'])} questions; {model['parameters'] / 1e6:.1f} M "
        f"parameters{shape}, {model['dtype']}; {machine['device_name']}{sets}, "
        f"{machine['threads']} threads; torch {machine['torch']}, "
        f"transformers {machine['transformers']}; "
        f"{summary['date'][:10]}, commit {machine['commit'][:7]})\n"
    )


COLUMNS = ("decoder", "tokens/s", "speedup", "95 %", "slower on", "MAT", "c", "tokens a step")


def overall(name: str, columns: tuple[str, ...] = (*COLUMNS, "first token", "same text")) -> str:
    """Decoder by decoder, all questions."""
    return tables.markdown(tables.overall(load(name)).only(*columns[1:]))


def has(name: str) -> bool:
    """True if the run was made: some need a processor that not every machine has."""
    return (RESULTS / f"{name}.json").exists()


def kinds_with_mat(name: str, decoders: tuple[str, ...]) -> str:
    """Kind by kind: the speedups of all decoders, and the MAT of some."""
    summary = load(name)
    titles, rows = tables.by_kind(summary)
    titles = [*titles, *(f"MAT {decoder.removeprefix('adaptive@')}" for decoder in decoders)]
    for row in rows:
        row += [f"{summary['decoders'][one]['kinds'][row[0]]['mat']:.2f}" for one in decoders]
    return tables.markdown(Table(titles, rows))


def slowest(name: str, decoder: str, count: int) -> str:
    """The questions that a decoder answered slowest in relation to generate."""
    summary = load(name)
    own, plain = (summary["per_question"][one] for one in (decoder, "generate"))
    found = sorted(
        (
            a["tokens_per_second"] / b["tokens_per_second"],
            question["id"],
            question["kind"],
            a["tokens"],
        )
        for question, a, b in zip(summary["questions"], own, plain)
    )
    rows = [[id_, kind, str(n), f"{ratio:.2f}x"] for ratio, id_, kind, n in found[:count]]
    titles = ["question", "kind", "tokens", f"speedup of {decoder}"]
    return tables.markdown(Table(titles, rows))


def demo() -> str:
    """What make demo printed."""
    printed = (RESULTS / "demo.txt").read_text("utf-8")
    return f"```text\n{printed}```\n"


def enabled() -> str:
    """What lab/measure_enable.py found."""
    found = json.loads((RESULTS / "cpu-enable.json").read_text("utf-8"))

    def ratio(name: str) -> str:
        part = found[name]
        low, middle, high = part["quartiles_per_round"]
        return f"{part['ratio_of_medians']:.2f} ({low:.2f} / {middle:.2f} / {high:.2f})"

    rounds = found["rounds"] - 1  # the first one is the warm-up
    return (
        f"`lab/measure_enable.py`, bundled model, {found['tokens']} tokens, {rounds} rounds of "
        "eight prompts in turn.\nRatio of medians, and quartiles of the ratios of the rounds:\n\n"
        "| | ratio |\n|---|---|\n"
        "| time of `model.generate` after `enable`, to `recycler.generate` with the same matrix | "
        f"{ratio('enable')} |\n"
        "| time of a step in bfloat16 with the float32 LM head, to one without | "
        f"{ratio('float32_logits')} |\n"
    )


def phases(name: str, *decoders: str) -> str:
    """Shares of a step's time."""
    found = tables.phases(load(name))
    return tables.markdown(found._replace(rows=[row for row in found.rows if row[0] in decoders]))


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
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals.update(
        load=load,
        has=has,
        command=command,
        overall=overall,
        kinds_with_mat=kinds_with_mat,
        slowest=slowest,
        demo=demo,
        enabled=enabled,
        phases=phases,
        served=served,
    )
    return environment.get_template("results.md.j2").render()


if __name__ == "__main__":
    write_text(ROOT / "docs" / "results.md", render())

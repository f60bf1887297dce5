"""Write docs/results.md from the summaries in bench/results and the text in results.md.j2.

python tools/write_results.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from token_recycling.bench import measures, tables
from token_recycling.files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


def load(name: str) -> dict[str, Any]:
    """The summary of a run."""
    summary: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return summary


def command(name: str) -> str:
    """The command line of a run, with its machine."""
    summary = load(name)
    machine, model = summary["machine"], summary["model"]
    words = machine["command"].replace(" --resume", "")
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
    titles, rows = tables.overall(load(name))
    kept = [titles.index(title) for title in columns]
    return tables.markdown(([titles[i] for i in kept], [[row[i] for i in kept] for row in rows]))


def kinds(name: str, *decoders: str) -> str:
    """Kind by kind, the speedup of some decoders (all, when none is named)."""
    titles, rows = tables.by_kind(load(name))
    kept = [i for i, title in enumerate(titles) if i < 2 or not decoders or title in decoders]
    return tables.markdown(([titles[i] for i in kept], [[row[i] for i in kept] for row in rows]))


def spec_bench(name: str) -> str:
    """Spec-Bench's own aggregate."""
    return tables.markdown(tables.spec_bench(load(name)))


def curve(*names: str) -> str:
    """Step costs in steps of one token, a run a column, at the shortest context."""
    curves = [load(name)["curve"] for name in names]
    titles = ["tokens verified"] + [
        f"{name} (1 token: {c['seconds'][0][0] * 1e3:.1f} ms)" for name, c in zip(names, curves)
    ]
    rows = [
        [str(size), *(f"{c['seconds'][0][i] / c['seconds'][0][0]:.2f}" for c in curves)]
        for i, size in enumerate(curves[0]["sizes"])
    ]
    return tables.markdown((titles, rows))


LOW = ("poem", "names", "novelty", "languages")
SHAPES = tuple(
    f"{shape}-{dtype}"
    for shape in ("smollm2-135m", "qwen2.5-0.5b")
    for dtype in ("bfloat16", "float32")
)
# runs in which every fixed draft size was measured, next to auto
SWEEPS = (
    "bundled-sizes",
    *SHAPES,
    "avx2-smollm2-135m-float32",
    "avx2-smollm2-135m-bfloat16",
    "avx2-qwen2.5-0.5b-float32",
)


def repeats(*names: str) -> str:
    """Overall speedups of repeated runs, and their spread."""
    runs = [load(name)["decoders"] for name in names]
    rows = []
    for decoder in list(runs[0])[1:]:
        found = [run[decoder]["overall"]["speedup"] for run in runs]
        rows.append([decoder, *(f"{x:.2f}x" for x in found), f"{measures.spread(found):.1%}"])
    return tables.markdown((["decoder", *names, "spread"], rows))


def low_redundancy() -> str:
    """What is lost where text repeats little."""
    lines = []
    for decoder in ("prompt-lookup", "paper", "auto"):
        entry = load("bundled")["decoders"][decoder]
        low = [entry["kinds"][kind] for kind in LOW]
        questions = sum(kind["questions"] for kind in low)
        slower = sum(kind["slower_than_baseline"] for kind in low)
        speeds = ", ".join(f"{kind} {m['speedup']:.2f}x" for kind, m in zip(LOW, low))
        lines.append(
            f"- `{decoder}`: {speeds}; against {entry['overall']['speedup']:.2f}x overall. "
            f"Slower than `model.generate` on {slower} of {questions}."
        )
    return "\n".join(lines)


def choices() -> str:
    """Per run: the speed of auto relative to the best fixed draft size."""
    rows = []
    for name in SWEEPS:
        decoders = load(name)["decoders"]
        speeds = {
            decoder: entry["overall"]["tokens_per_second"]
            for decoder, entry in decoders.items()
            if decoder.startswith("paper@ranked") or decoder == "none"
        }
        best = max(speeds, key=speeds.__getitem__)
        auto = decoders["auto"]["overall"]
        worst = min(m["speedup"] for m in decoders["auto"]["kinds"].values())
        rows.append(
            [
                name,
                f"{best}, {speeds[best]:.1f} tokens/s",
                f"{auto['tokens_per_second']:.1f} tokens/s",
                f"{auto['tokens_per_second'] / speeds[best]:.3f}",
                f"{auto['speedup']:.2f}x",
                f"{worst:.2f}x",
            ]
        )
    titles = ["run", "best fixed size", "auto", "auto / best", "speedup of auto", "worst kind"]
    return tables.markdown((titles, rows))


def phases(name: str, *decoders: str) -> str:
    """Shares of a step's time."""
    found = {d: load(name)["decoders"][d]["overall"]["phases"] for d in decoders}
    titles = ["decoder", *next(iter(found.values()))]
    return tables.markdown(
        (titles, [[d, *(f"{share:.1%}" for share in row.values())] for d, row in found.items()])
    )


def mats(name: str, *decoders: str) -> str:
    """MAT by kind."""
    entries = load(name)["decoders"]
    rows = [
        [kind, *(f"{entries[d]['kinds'][kind]['mat']:.2f}" for d in decoders)]
        for kind in entries[decoders[0]]["kinds"]
    ]
    return tables.markdown((["MAT", *decoders], rows))


def replayed() -> str:
    """MAT of drafters on recorded answers."""
    rows = [
        [name, str(row["answers"]), str(row["tokens"]), f"{row['nodes']:.1f}", f"{row['mat']:.2f}"]
        for name, row in load("adaptive-replay")["decoders"].items()
    ]
    return tables.markdown((["decoder", "answers", "tokens", "tokens a step", "MAT"], rows))


def promises() -> str:
    """MAT predicted and measured, of a cold and of a hot run."""
    rows = [
        [
            run,
            str(found["steps"]),
            f"{found['promised']:.2f}",
            f"{found['came']:.2f}",
            f"{found['promised'] / found['came']:.3f}",
        ]
        for run, found in load("adaptive-calibration")["runs"].items()
    ]
    titles = ["start", "steps", "predicted MAT", "measured MAT", "predicted / measured"]
    return tables.markdown((titles, rows))


def starts(name: str) -> str:
    """What other starts come at, relative to a hot one, before and after 500 tokens."""
    found = load(name)["tokens, steps, seconds"]

    def rate(parts: list[list[float]], over: int) -> float:
        return sum(part[0] for part in parts) / sum(part[over] for part in parts)

    rows = []
    for start, parts in found.items():
        row = [start]
        for which in ("early", "later"):
            own, hot = parts[which], found["hot"][which]
            row += [
                f"{rate([own], 1):.2f}",
                f"{rate([own], 2):.0f}",
                "" if start == "other order" else f"{rate([own], 2) / rate([hot], 2):.2f}",
            ]
        own, hot = list(parts.values()), list(found["hot"].values())
        row.append(f"{rate(own, 2) / rate(hot, 2):.2f}")
        rows.append(row)
    early, later = ("MAT", "tokens/s", "of hot"), ("MAT after", "tokens/s after", "of hot after")
    return tables.markdown((["start", *early, *later, "of hot, all"], rows))


def render() -> str:
    """Return the text with all figures."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals.update(
        load=load,
        command=command,
        overall=overall,
        kinds=kinds,
        spec_bench=spec_bench,
        curve=curve,
        repeats=repeats,
        low_redundancy=low_redundancy,
        choices=choices,
        shapes=SHAPES,
        phases=phases,
        mats=mats,
        replayed=replayed,
        promises=promises,
        starts=starts,
        COLUMNS_ALL=(*COLUMNS, "first token", "same text", "matrix"),
    )
    return environment.get_template("results.md.j2").render()


if __name__ == "__main__":
    write_text(ROOT / "docs" / "results.md", render())

"""Write docs/results.md from the summaries in bench/results and the text in results.md.j2.

python tools/write_results.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
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


SIZES = (
    "sizes-bundled",
    "sizes-smollm2-135m-bfloat16",
    "sizes-smollm2-135m-float32",
    "sizes-qwen2.5-0.5b-bfloat16",
)
# rows of the summary: what is written, and the decoder
SUMMARY = (
    ("`model.generate`", "generate"),
    ("its `prompt_lookup_num_tokens=10`", "generate-pld"),
    ("our plain step (`--drafter none`)", "none"),
    ("`paper`, the published tree of 80 nodes", "paper"),
    ("`adaptive@ranked-15`, 15 nodes", "adaptive@ranked-15"),
    ("`auto`, the default: automatic size", "auto"),
    ("`auto+graph`, the step compiled (`--graph`)", "auto+graph"),
)


def cell(name: str, decoder: str) -> str:
    """MAT and speedup of a decoder, empty if it was not measured."""
    entry = load(name)["decoders"].get(decoder)
    if entry is None:
        return ""
    overall = entry["overall"]
    low, high = overall["speedup_interval"]
    return f"{overall['mat']:.2f}, {overall['speedup']:.2f}x ({low:.2f}–{high:.2f})"


def worst_kind(name: str) -> str:
    """The kind of text with the smallest speedup of auto."""
    found = load(name)["decoders"]["auto"]["kinds"]
    kind = min(found, key=lambda kind: found[kind]["speedup"])
    return f"{found[kind]['speedup']:.2f}x ({kind})"


def demo() -> str:
    """What make demo printed."""
    printed = (RESULTS / "demo.txt").read_text("utf-8")
    return f"```text\n{printed}```\n"


def enabled() -> str:
    """What tools/measure_enable.py found."""
    found = json.loads((RESULTS / "cpu-enable.json").read_text("utf-8"))

    def ratio(name: str) -> str:
        part = found[name]
        low, middle, high = part["quartiles_per_round"]
        return f"{part['ratio_of_medians']:.2f} ({low:.2f} / {middle:.2f} / {high:.2f})"

    rounds = found["rounds"] - 1  # the first one is the warm-up
    return (
        f"`tools/measure_enable.py`, bundled model, {found['tokens']} tokens, {rounds} rounds of "
        "eight prompts in turn.\nRatio of medians, and quartiles of the ratios of the rounds:\n\n"
        "| | ratio |\n|---|---|\n"
        "| time of `model.generate` after `enable`, to `recycler.generate` with the same matrix | "
        f"{ratio('enable')} |\n"
        "| time of a step in bfloat16 with the float32 LM head, to one without | "
        f"{ratio('float32_logits')} |\n"
    )


def step_costs() -> str:
    """The cost of steps of every fixed size, in steps of generate."""
    sizes = sorted(int(d.rpartition("-")[2]) for d in load(SIZES[0])["decoders"] if "@ranked" in d)
    rows = []
    for size in sizes:
        found = [
            load(name)["decoders"][f"adaptive@ranked-{size}"]["overall"]["c"] for name in SIZES
        ]
        rows.append([str(size + 1), *(f"{c:.2f}" for c in found)])
    titles = ["tokens verified", *(name.removeprefix("sizes-") for name in SIZES)]
    return tables.markdown((titles, rows))


def repeats(*names: str) -> str:
    """Overall speedups of repeated runs, and their spread."""
    runs = [load(name)["decoders"] for name in names]
    rows = []
    for decoder in list(runs[0])[1:]:
        found = [run[decoder]["overall"]["speedup"] for run in runs]
        rows.append([decoder, *(f"{x:.2f}x" for x in found), f"{measures.spread(found):.1%}"])
    return tables.markdown((["decoder", *names, "spread"], rows))


def choices() -> str:
    """Per run: the speed of auto relative to the best fixed draft size."""
    rows = []
    for name in SIZES:
        decoders = load(name)["decoders"]
        fixed = {d: e for d, e in decoders.items() if d.startswith("adaptive@ranked")}
        speeds = {d: entry["overall"]["tokens_per_second"] for d, entry in fixed.items()}
        best = max(speeds, key=speeds.__getitem__)
        auto = decoders["auto"]["overall"]
        rows.append(
            [
                name.removeprefix("sizes-"),
                f"{best}, {speeds[best]:.1f} tokens/s",
                f"{auto['tokens_per_second']:.1f} tokens/s",
                f"{auto['tokens_per_second'] / speeds[best]:.2f}",
                f"{auto['speedup']:.2f}x",
                worst_kind(name),
            ]
        )
    titles = ["model", "best fixed size", "auto", "auto / best", "speedup of auto", "worst kind"]
    return tables.markdown((titles, rows))


def rounds(prefix: str) -> list[dict[str, Any]]:
    """The three runs of a comparison on unseen prompts."""
    return [load(f"{prefix}-{number}") for number in (1, 2, 3)]


def per_question(prefix: str, decoder: str) -> list[tuple[str, str, int, float]]:
    """Name, kind, tokens and median speedup of every question of three runs."""
    runs = rounds(prefix)
    found = []
    for index, question in enumerate(runs[0]["questions"]):
        ratios = []
        for run in runs:
            own, plain = (run["per_question"][d][index] for d in (decoder, "generate"))
            ratios.append(own["tokens_per_second"] / plain["tokens_per_second"])
        tokens = runs[0]["per_question"][decoder][index]["tokens"]
        name = question["name"] or f"{question['suite']}/{question['id']}"
        found.append((name, question["kind"], tokens, median(ratios)))
    return found


def never_slower(prefix: str) -> str:
    """Speedups of the kinds, and how many questions are slower than generate."""
    decoders = ("generate-pld", "auto")
    found = {d: per_question(prefix, d) for d in decoders}
    kinds = list(dict.fromkeys(kind for _, kind, _, _ in found["auto"]))

    def row(title: str, chosen: Callable[[str], bool]) -> list[str]:
        cells = [title, str(sum(chosen(kind) for _, kind, _, _ in found["auto"]))]
        for d in decoders:
            own = [one for one in found[d] if chosen(one[1])]
            speeds = [speed for _, _, _, speed in own]
            low, high = quantiles(speeds, n=4)[::2] if len(speeds) > 1 else speeds * 2
            long = sum(tokens >= 100 and speed < 0.9 for _, _, tokens, speed in own)
            cells += [f"{median(speeds):.2f}x", f"{low:.2f} / {high:.2f}"]
            cells += [str(sum(speed < 1 for speed in speeds)), str(long)]
        return cells

    titles = ["kind", "questions"]
    for d in decoders:
        titles += [d, "quartiles", "below 1", "of 100 tokens and more: below 0.9"]
    every = row("all", lambda kind: True)
    return tables.markdown((titles, [every, *(row(k, lambda own, k=k: own == k) for k in kinds)]))


def worst_questions(prefix: str) -> str:
    """The ten questions with the smallest speedups of auto."""
    found = sorted(per_question(prefix, "auto"), key=lambda one: one[3])[:10]
    rows = [[name, kind, str(tokens), f"{speed:.2f}x"] for name, kind, tokens, speed in found]
    return tables.markdown((["question", "kind", "tokens", "speedup of auto"], rows))


def phases(name: str, *decoders: str) -> str:
    """Shares of a step's time."""
    found = {d: load(name)["decoders"][d]["overall"]["phases"] for d in decoders}
    titles = ["decoder", *next(iter(found.values()))]
    return tables.markdown(
        (titles, [[d, *(f"{share:.1%}" for share in row.values())] for d, row in found.items()])
    )


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


def served(name: str) -> str:
    """Tokens per second of the servers, by requests at once: median and range of the rounds."""
    found = load(name)["side_by_side"]
    servers = list(dict.fromkeys(key.rpartition(" at ")[0] for key in found))
    at_once = list(dict.fromkeys(key.rpartition(" at ")[2] for key in found))

    def cell(server: str, number: str) -> str:
        speeds = [one["tokens_per_second"] for one in found[f"{server} at {number}"]]
        return f"{median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})"

    rows = [[server, *(cell(server, number) for number in at_once)] for server in servers]
    return tables.markdown((["server", *(f"{number} at once" for number in at_once)], rows))


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
        repeats=repeats,
        choices=choices,
        sizes=SIZES,
        summary_decoders=SUMMARY,
        cell=cell,
        worst_kind=worst_kind,
        demo=demo,
        enabled=enabled,
        step_costs=step_costs,
        never_slower=never_slower,
        worst_questions=worst_questions,
        phases=phases,
        promises=promises,
        starts=starts,
        served=served,
    )
    return environment.get_template("results.md.j2").render()


if __name__ == "__main__":
    write_text(ROOT / "docs" / "results.md", render())

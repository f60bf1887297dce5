"""The figures of gpu_suite.py as Markdown.

python lab/gpu_table.py FILE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from engine_bench.measure import table as table_of


def table(found: dict[str, Any]) -> str:
    """Return the figures that matter as Markdown."""
    machine = found["machine"]["device_name"]
    lines = [f"Bandwidth {found['bandwidth'] / 1e9:.0f} GB/s on {machine}."]
    for model, dtypes in found["models"].items():
        for dtype, parts in dtypes.items():
            lines += ["", f"### {model}, {dtype}"]
            for name, part in parts.items():
                if "failed" in part:
                    lines += ["", f"{name} failed: {part['failed'][-300:]}"]
                else:
                    lines += ["", *WRITERS[name](part)]
    return "\n".join(lines)


def _grid(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def _launches(part: dict[str, Any]) -> list[str]:
    if "not counted" in part:
        return [f"Launches outside the forward: not counted ({part['not counted']})."]
    return [
        f"Launches outside the forward, {batch} rows: {len(names)} ({', '.join(names)})."
        for batch, names in part.items()
    ]


def _identity(part: dict[str, Any]) -> list[str]:
    count = part["prompts"]
    gaps = sorted(round(one["roundings"], 1) for one in part["parted"])
    return [
        f"Text of captured steps: the eager loop's on {part['eager']} of {count} prompts, "
        f"generate's on {part['generate']}, its own again on {part['again']}; "
        f"{part['near ties']} of {len(gaps)} differences begin at a near tie (roundings: {gaps})."
    ]


def _syncs(part: dict[str, Any]) -> list[str]:
    if "not counted" in part:
        return [f"Waits of the host: not counted ({part['not counted']})."]
    return [f"Waits of the host per step: {part['sum']:.2f} ({part['per step']})."]


def _costs(part: dict[str, Any]) -> list[str]:
    rows = [
        [
            str(row["context"]),
            str(row["nodes"]),
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['c']:.2f}",
            f"{row['of bandwidth']:.0%}",
        ]
        for row in part["rows"]
    ]
    return _grid(["context", "nodes", "step, ms", "c", "of bandwidth"], rows)


def _compiled(part: dict[str, Any]) -> list[str]:
    rows = [
        [str(row["nodes"]), row["by"], f"{row['seconds'] * 1e3:.2f}", f"{row['ready']:.0f}"]
        for row in part["rows"]
    ]
    return _grid(["nodes", "backend", "step, ms", "ready after, s"], rows)


def _drafting(part: dict[str, Any]) -> list[str]:
    rows = [[str(row["nodes"]), row["by"], f"{row['seconds'] * 1e3:.3f}"] for row in part["rows"]]
    return _grid(["nodes", "a captured step that drafts on the", "ms"], rows)


def _phases(part: dict[str, Any]) -> list[str]:
    rows = [
        [
            nodes,
            f"{one['step'] * 1e3:.2f}",
            f"{one['model'] * 1e3:.2f}",
            f"{(one['step'] - one['model']) * 1e3:.2f}",
        ]
        for nodes, one in part.items()
        if isinstance(one, dict)
    ]
    return _grid(["nodes", "step, ms", "model, ms", "rest, ms"], rows)


def _kernels(part: dict[str, Any]) -> list[str]:
    return [*_ways("attention", part["attention"]), "", *_ways("top-k", part["top-k"])]


def _ways(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Microseconds of every way, a line for each size."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    sizes: dict[tuple[Any, int], dict[str, str]] = {}
    for row in rows:
        text = f"{row['seconds'] * 1e6:.0f}" if "seconds" in row else "failed"
        sizes.setdefault((row.get("context", ""), row["nodes"]), {})[row["way"]] = text
    head = [f"{name}: context", "nodes", *(f"{way}, us" for way in ways)]
    return _grid(
        head,
        [
            [str(context), str(nodes), *(found[way] for way in ways)]
            for (context, nodes), found in sizes.items()
        ],
    )


def _warm(part: dict[str, Any]) -> list[str]:
    rate = part["computed"] / max(part["seconds"], 1e-9)
    whole = "all rows" if part["complete"] else "not all rows"
    return [f"Warm rows: {part['computed']} in {part['seconds']:.1f} s ({rate:.0f}/s), {whole}."]


def _rate(taken: list[list[float]]) -> float:
    """Tokens per second, the median over answers."""
    return median(tokens / seconds for tokens, seconds in taken)


def _speeds(part: dict[str, Any]) -> list[str]:
    rates = {name: _rate(taken) for name, taken in part["taken"].items() if taken}
    rows = []
    for name, rate in rates.items():
        ratios = [f"{rate / rates[b]:.2f}x" if b in rates else "" for b in BASES]
        rows.append([name, f"{rate:.1f}", *ratios])
    lines = _grid(["way", "tokens/s, median", *(f"of {base}" for base in BASES)], rows)
    return [*lines, *(f"{name} failed: {why}" for name, why in part["failed ways"].items())]


def _engines(part: dict[str, Any]) -> list[str]:
    lines = []
    for name, rows in part.items():
        if isinstance(rows, str):
            lines.append(f"{name}: {rows}")
        else:
            lines += [f"{name}:", "", *table_of(rows).splitlines()]
    return lines


BASES = ("plain graph", "generate")
WRITERS = {
    "launches": _launches,
    "identity": _identity,
    "syncs": _syncs,
    "costs": _costs,
    "compiled": _compiled,
    "drafting": _drafting,
    "phases": _phases,
    "kernels": _kernels,
    "warm": _warm,
    "speeds": _speeds,
    "engines": _engines,
}

if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))

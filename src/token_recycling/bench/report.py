"""Benchmark report: one self-contained HTML document."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from token_recycling.bench.variants import NOT_RECYCLED
from token_recycling.decoding.metrics import PHASES
from token_recycling.util.files import write_text

NOTHING = "–"
SHOWN = 12  # losing prompts shown; the others are collapsed


@dataclass(frozen=True)
class Table:
    """A table; the first cell of every row is the row's header.

    Attributes:
        label: description for screen readers.
        columns: the column headers.
        rows: the cells as text.
        words: indices of left-aligned text columns; the others hold numbers.
        prose: True if the last column holds whole sentences.
    """

    label: str
    columns: list[str]
    rows: list[list[str]]
    words: frozenset[int] = frozenset()
    prose: bool = False


def render(summary: dict[str, Any]) -> str:
    """Return the HTML report of a benchmark's ``summary``."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    losing = summary.get("losing") or []
    return environment.get_template("report.html.j2").render(
        model=(summary.get("model") or {}).get("name") or "a model",
        baseline=summary["baseline"],
        headline=_headline(summary),
        subject=_subject(summary),
        overall=_overall(summary),
        by_kind=_by_kind(summary),
        depths=_depths(summary),
        costs=_costs(summary),
        draft_size=_draft_size(summary),
        phases=_phases(summary),
        spec_bench=_spec_bench(summary),
        losing=_losing(losing[:SHOWN]),
        more_losing=_losing(losing[SHOWN:]),
        sample=_sample(summary.get("sample")),
        conditions=_conditions(summary),
        prompts=_prompts(summary.get("questions") or []),
        left_out=summary.get("left_out") or [],
    )


def write(summary: dict[str, Any], path: Path) -> None:
    """Write the HTML report of ``summary`` to ``path``.

    Raises:
        TokenRecyclingError: the file cannot be written.
    """
    html = render(summary)
    write_text(path, html)


def compared(summary: dict[str, Any]) -> list[str]:
    """Return the names of the decoders that are not baselines themselves."""
    return [
        name
        for name, decoder in summary["decoders"].items()
        if name not in (summary["baseline"], (decoder.get("about") or {}).get("baseline"))
    ]


# Numbers formatted as text


def number(value: object) -> float:
    """Return ``value`` as a float, or NaN if it is not a finite number."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return math.nan


def numbers(values: Iterable[object] | None) -> list[float]:
    """Return ``number`` of each value; an empty list for None."""
    return [number(value) for value in values or ()]


def relative(seconds: Iterable[object] | None) -> list[float]:
    """Return ``seconds`` relative to the first value."""
    values = numbers(seconds)
    return [value / values[0] if values[0] else math.nan for value in values]


def _figure(value: object, form: str = ".2f") -> str:
    figure = number(value)
    return NOTHING if math.isnan(figure) else f"{figure:{form}}"


def _times(value: object) -> str:
    """Format a speedup; values below 1 are marked with ▼."""
    text = _figure(value)
    return text if text == NOTHING else f"{'▼ ' if number(value) < 1 else ''}{text}×"


def _fraction(value: object) -> str:
    """Format a fraction as per cent, rounded down: 100 % means all."""
    fraction = number(value)
    if math.isnan(fraction):
        return NOTHING
    return f"{math.floor(1000 * fraction + 1e-6) / 10:g}\N{NO-BREAK SPACE}%"


def _several(values: Iterable[object] | None, between: str) -> str:
    texts = [_figure(value) for value in values or ()]
    return between.join(texts) if texts and NOTHING not in texts else NOTHING


def _seconds(value: object) -> str:
    seconds = number(value)
    if math.isnan(seconds):
        return NOTHING
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _bytes(value: object) -> str:
    size = number(value)
    if math.isnan(size):
        return NOTHING
    unit = 0 if size < 1 else min(3, int(math.log2(size)) // 10)
    return f"{size / 1024**unit:.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _count(value: object) -> str:
    count = number(value)
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return _figure(count, ",.0f")


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or NOTHING
    return NOTHING if value is None or value == "" or value != value else str(value)


# Parts of the summary


def _measures(summary: dict[str, Any], name: str, kind: str | None = None) -> dict[str, Any]:
    decoder = summary["decoders"][name]
    measures = decoder.get("overall") if kind is None else (decoder.get("kinds") or {}).get(kind)
    return measures or {}


def _about(summary: dict[str, Any], name: str) -> dict[str, Any]:
    return summary["decoders"][name].get("about") or {}


def _headline(summary: dict[str, Any]) -> str:
    """Return one paragraph on the fastest recycled decoder, faster than its baseline or not."""
    names = compared(summary)
    recycled = [n for n in names if _about(summary, n).get("drafter") not in NOT_RECYCLED]
    speeds = {name: number(_measures(summary, name).get("speedup")) for name in recycled}
    speeds = {name: speed for name, speed in speeds.items() if not math.isnan(speed)}
    if not speeds:
        return f"No recycled decoder was compared with {summary['baseline']}."
    best = max(speeds, key=lambda name: speeds[name])
    measures = _measures(summary, best)
    baseline = _about(summary, best).get("baseline") or summary["baseline"]
    several = len(speeds) > 1
    who = f"fastest of {len(speeds)} recycled decoders, {best}," if several else f"decoder {best}"
    return (
        f"The {who} decoded {speeds[best]:.2f} times as fast as {baseline}"
        f"{_certainty(measures)} It was slower on {_slower(measures)} prompts, and "
        f"{_fraction(measures.get('identical'))} of its answers are identical to those of "
        f"{baseline}."
    )


def _certainty(measures: dict[str, Any]) -> str:
    interval = numbers(measures.get("speedup_interval"))
    if len(interval) != 2 or any(map(math.isnan, interval)):
        return "."
    low, high = interval
    verdict = "" if low > 1 else ": slower" if high < 1 else ": no clear difference"
    return f" (95\N{NO-BREAK SPACE}% interval {low:.2f} to {high:.2f}){verdict}."


def _slower(measures: dict[str, Any]) -> str:
    figures = (measures.get("slower_than_baseline"), measures.get("questions"))
    return " of ".join(_figure(figure, ".0f") for figure in figures)


def _subject(summary: dict[str, Any]) -> str:
    """Return a line with the model and the machine that were measured."""
    model, machine = summary.get("model") or {}, summary.get("machine") or {}
    what = [_text(model.get("name")), f"{_count(model.get('parameters'))} parameters"]
    what += [str(model[key]) for key in ("dtype", "note") if model.get(key)]
    where = [_text(machine.get(key)) for key in ("device_name", "cpu") if machine.get(key)]
    where = list(dict.fromkeys(where))  # on a CPU both may be equal
    where += [f"{machine[key]} {key}" for key in ("cores", "threads") if machine.get(key)]
    return f"{', '.join(what)}; on {', '.join(where) or 'an unknown machine'}"


def _overall(summary: dict[str, Any]) -> Table:
    columns = ["Decoder", "Speedup", "95\N{NO-BREAK SPACE}% interval", "Quartiles by prompt"]
    columns += ["Tokens/s", "MAT", "c", "Identical", "First token", "Slower on"]
    columns += ["Spread over rounds", "Peak memory", "Matrix", "Drafter, tree"]
    rows = []
    for name, decoder in summary["decoders"].items():
        m = _measures(summary, name)
        rows.append(
            [
                name,
                _times(m.get("speedup")),
                _several(m.get("speedup_interval"), "–"),
                _several(m.get("speedup_quartiles"), " / "),
                _figure(m.get("tokens_per_second"), ".1f"),
                _figure(m.get("mat")),
                _figure(m.get("c")),
                _fraction(m.get("identical")),
                _seconds(m.get("ttft_seconds")),
                _slower(m),
                _fraction(decoder.get("spread")),
                _bytes(decoder.get("peak_memory_bytes")),
                _bytes(decoder.get("matrix_bytes")),
                _kit(_about(summary, name)),
            ]
        )
    return Table("All decoders over all prompts", columns, rows, frozenset({len(columns) - 1}))


def _kit(about: dict[str, Any]) -> str:
    """Return drafter, tree, k and temperature of a decoder as text."""
    parts = [str(about["drafter"])] if about.get("drafter") else []
    if about.get("drafter") not in NOT_RECYCLED:
        parts += [f"{key} {about[key]}" for key in ("tree", "k") if about.get(key) is not None]
    if number(about.get("temperature")) > 0:
        parts.append(f"temperature {about['temperature']}, against {about.get('baseline')}")
    return ", ".join(parts) or NOTHING


def _by_kind(summary: dict[str, Any]) -> Table:
    names = compared(summary)
    rows = []
    for kind in summary.get("kinds") or ():
        questions = _measures(summary, summary["baseline"], kind).get("questions")
        speeds = [_times(_measures(summary, name, kind).get("speedup")) for name in names]
        rows.append([str(kind), _figure(questions, ".0f"), *speeds])
    return Table("Speedup by kind", ["Kind", "Prompts", *names], rows)


def _depths(summary: dict[str, Any]) -> Table:
    rows_by_name = {
        name: [
            _fraction(fraction)
            for fraction in _measures(summary, name).get("accepted_per_depth") or ()
        ]
        for name in summary["decoders"]
    }
    deepest = max(map(len, rows_by_name.values()), default=0)
    rows = [
        [name, *row, *[NOTHING] * (deepest - len(row))] for name, row in rows_by_name.items() if row
    ]
    return Table("Accepted by depth", ["Decoder", *map(str, range(1, deepest + 1))], rows)


def _costs(summary: dict[str, Any]) -> Table:
    curve = summary.get("curve") or {}
    rows = [
        [_text(context), *map(_figure, relative(row))]
        for context, row in zip(curve.get("contexts") or (), curve.get("seconds") or ())
    ]
    sizes = [_figure(size, "g") for size in curve.get("sizes") or ()]
    return Table("Step cost by context and tokens verified", ["Context", *sizes], rows)


def _draft_size(summary: dict[str, Any]) -> Table:
    draft_size = summary.get("draft_size") or {}
    columns = [draft_size.get(key) or () for key in ("sizes", "expected_mat", "expected_speed")]
    rows = [
        [
            _figure(size, "g") + (" (chosen)" if size == draft_size.get("chosen") else ""),
            _figure(mat),
            _figure(speed, ".1f"),
        ]
        for size, mat, speed in zip(*columns)
    ]
    head = ["Tokens verified", "Expected MAT", "Expected tokens/s"]
    return Table("Expected speed by draft size", head, rows)


def _phases(summary: dict[str, Any]) -> Table:
    rows = [
        [name, *(_fraction(phases.get(phase)) for phase in PHASES)]
        for name in summary["decoders"]
        if (phases := _measures(summary, name).get("phases"))
    ]
    return Table("Share of time by phase", ["Decoder", *PHASES], rows)


def _spec_bench(summary: dict[str, Any]) -> Table:
    rows = []
    for name in summary["decoders"]:
        m = _measures(summary, name).get("spec_bench") or {}
        speed, mat = _figure(m.get("tokens_per_second"), ".1f"), _figure(m.get("mat"))
        rows.append([name, speed, _times(m.get("speedup")), mat])
    return Table("Spec-Bench's aggregate", ["Decoder", "Tokens/s", "Speedup", "MAT"], rows)


def _losing(prompts: list[dict[str, Any]]) -> Table:
    columns = ["Prompt", "Speedup", "MAT", "Tokens", "Kind", "Decoder", "Begins with"]
    rows = [
        [
            _text(prompt.get("name")),
            _times(prompt.get("speedup")),
            _figure(prompt.get("mat")),
            _figure(prompt.get("tokens"), ".0f"),
            *(_text(prompt.get(key)) for key in ("kind", "decoder", "prompt")),
        ]
        for prompt in prompts
    ]
    words = frozenset({4, 5, 6})
    return Table("Prompts slower than the baseline", columns, rows, words, prose=True)


def _sample(sample: dict[str, Any] | None) -> dict[str, Any] | None:
    """Join adjacent pieces of the sample text that are both drafted or both not."""
    if not sample:
        return None
    pieces = [(str(text), bool(drafted)) for text, drafted in sample.get("pieces") or ()]
    runs = groupby(pieces, key=lambda piece: piece[1])
    return {
        **{key: _text(sample.get(key)) for key in ("name", "decoder", "prompt")},
        "accepted": sum(drafted for _, drafted in pieces),
        "tokens": len(pieces),
        "runs": [("".join(text for text, _ in run), drafted) for drafted, run in runs],
    }


def _conditions(summary: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return machine, model, settings and report format as headings with lists of facts."""
    forms = {"memory_bytes": _bytes, "parameters": _count, "vocab_size": _count}
    return [
        (
            part,
            [
                (key.removesuffix("_bytes").replace("_", " "), forms.get(key, _text)(value))
                for key, value in (summary.get(part) or {}).items()
            ],
        )
        for part in ("machine", "model", "settings")
    ] + [("report", [("date", _text(summary.get("date"))), ("format", _text(summary["format"]))])]


def _prompts(questions: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the prompts by kind."""
    kinds: dict[str, list[str]] = {}
    for question in questions:
        kinds.setdefault(_text(question.get("kind")), []).append(_text(question.get("name")))
    return kinds

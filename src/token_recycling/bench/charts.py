"""Charts of the report: inline SVG that stays readable at phone width."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from markupsafe import Markup

from token_recycling.decoding.metrics import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches, and points for FONT. A phone shows 3.4 inches on about 320 pixels: 9.5 pt are 12 pixels.
WIDTH, LEFT, RIGHT, BOTTOM, FONT = 3.4, 0.12, 0.24, 0.42, 9.5
HEADING, GAP = 0.2, 0.1  # inches: the label above a group of bars, the space below it

# Colours of Okabe and Ito with good contrast on white; further decoders reuse them with hatching
# and dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
BASELINE, INK = "#6b7280", "#1f2430"
HATCHES = (None, "/////", ".....", "xxxxx")
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX*<>hp"
# Paul Tol's light colours: distinct from the decoders' colours and light enough for dark labels.
PHASE_COLOURS = ("#77aadd", "#dddddd", "#eedd88", "#ee8866", "#44bb99")

RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "token-recycling",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": FONT,
    "axes.labelsize": FONT,
    "xtick.labelsize": FONT,
    "ytick.labelsize": FONT,
    "legend.fontsize": FONT,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "legend.borderaxespad": 0,
    "legend.labelspacing": 0.35,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": "#9aa0a8",
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e5e8",
    "grid.linewidth": 0.7,
    "ytick.left": False,
    "hatch.linewidth": 0.9,
    "lines.markersize": 4,
    "lines.linewidth": 1.4,
}


def number(value: object) -> float:
    """Return ``value`` as a float, or NaN if it is not a finite number."""
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    return math.nan


def numbers(values: Sequence[object] | None) -> list[float]:
    """Return ``number`` of each value; an empty list for None."""
    return [number(value) for value in values or ()]


def relative(seconds: Sequence[object] | None) -> list[float]:
    """Return ``seconds`` relative to the first value."""
    values = numbers(seconds)
    return [value / values[0] if values[0] else math.nan for value in values]


def compared(summary: dict[str, Any]) -> list[str]:
    """Return the names of the decoders that are not baselines themselves."""
    return [
        name
        for name, decoder in summary["decoders"].items()
        if name not in (summary["baseline"], (decoder.get("about") or {}).get("baseline"))
    ]


def drawable() -> bool:
    """Return True if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(summary: dict[str, Any]) -> dict[str, Markup]:
    """Return the charts by name, without those for which the summary has no figures.

    Without matplotlib the result is empty.
    """
    if not drawable():
        return {}
    import matplotlib

    charts = {
        "speedup": ("Speedup of every decoder by kind of prompt", _speedup),
        "depth": ("Share of steps by minimum number of accepted tokens", _depth),
        "cost": ("Time of a step by number of tokens verified", _cost),
        "draft_size": ("Expected tokens per second by tree size", _draft_size),
        "phases": ("Time of a step by phase", _phases),
    }
    drawn = {}
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # SVG text needs no glyphs
        for name, (label, chart) in charts.items():
            if (figure := chart(summary)) is not None:
                drawn[name] = _inline(figure, name, label)
    return drawn


def _bar(summary: dict[str, Any], decoder: str) -> dict[str, Any]:
    """Return the style of a decoder's bars: its colour in all charts, and a hatch."""
    colour, turn, _ = _looks(summary, decoder)
    return {"color": colour, "hatch": HATCHES[turn % len(HATCHES)]}


def _line(summary: dict[str, Any], decoder: str) -> dict[str, Any]:
    """Return the style of a decoder's lines: its colour in all charts, dashes and a marker."""
    colour, turn, index = _looks(summary, decoder)
    marker, dashes = MARKERS[index % len(MARKERS)], DASHES[turn % len(DASHES)]
    return {"color": colour, "marker": marker, "linestyle": dashes}


def _looks(summary: dict[str, Any], decoder: str) -> tuple[str, int, int]:
    """Return the colour, how often the palette has wrapped around, and the decoder's index."""
    names = compared(summary)
    if decoder not in names:
        return BASELINE, 0, 0
    turn, index = divmod(names.index(decoder), len(COLOURS))
    return COLOURS[index], turn, names.index(decoder)


def _short(name: object, length: int = 30) -> str:
    """Truncate a name to ``length`` and replace unprintable characters."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
    return text if len(text) <= length else text[: length - 1] + "…"


def _canvas(plot: float, legend: list[str], left: float, title: str = "") -> tuple[Figure, Axes]:
    """Make a figure with a plot ``plot`` inches high, and room for legend and title above it."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(legend) / _columns(legend))
    above = 0.18 * rows + (0.28 if title else 0.08)
    height = above + plot + BOTTOM
    figure = Figure(figsize=(WIDTH, height))
    wide = WIDTH - left - RIGHT
    axes = figure.add_axes((left / WIDTH, BOTTOM / height, wide / WIDTH, plot / height))
    figure.text(0, (BOTTOM + plot + 0.09) / height, title)
    return figure, axes


def _columns(legend: list[str]) -> int:
    """Return the number of legend columns that fit these names."""
    longest = max(map(len, legend), default=0)
    return 3 if longest <= 7 else 2 if longest <= 16 else 1


def _legend(figure: Figure, axes: Axes, names: list[str]) -> None:
    handles, _ = axes.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="upper left", bbox_to_anchor=(0, 1), ncols=_columns(names), numpoints=1
    )


def _bars(groups: list[str], legend: list[str], size: float) -> tuple[Figure, Axes, list[float]]:
    """Make a figure of groups of horizontal bars, each group below its name.

    One unit of the vertical axis is one inch; it points downwards.

    Returns:
        Figure, axes, and the y coordinate where the bars of each group start.
    """
    pitch = HEADING + size + GAP
    figure, axes = _canvas(pitch * len(groups), legend, LEFT)
    axes.set_ylim(pitch * len(groups), 0)
    axes.set_yticks([])
    for i, group in enumerate(groups):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # covers the grid
        axes.text(0, pitch * i + HEADING / 2, _short(group, 36), va="center", zorder=4, bbox=box)
    return figure, axes, [pitch * i + HEADING for i in range(len(groups))]


def _speedup(summary: dict[str, Any]) -> Figure | None:
    """Draw speedups as grouped bars with their intervals, and a line at the baseline."""
    if not (names := compared(summary)):
        return None
    kinds = summary.get("kinds") or []
    legend = [_short(name) for name in names]
    bar = min(0.14, max(0.055, 0.6 / len(names)))
    figure, axes, tops = _bars(["all prompts", *kinds], legend, bar * len(names))
    for i, name in enumerate(names):
        decoder = summary["decoders"][name]
        by_kind = decoder.get("kinds") or {}
        measures = [decoder.get("overall") or {}, *((by_kind.get(kind) or {}) for kind in kinds)]
        centres = [top + (i + 0.5) * bar for top in tops]
        speeds = numbers([m.get("speedup") for m in measures])
        widths = [0.0 if math.isnan(speed) else speed for speed in speeds]
        look = {**_bar(summary, name), "edgecolor": "white", "linewidth": 0}
        axes.barh(centres, widths, 0.9 * bar, label=legend[i], **look)
        for y, m in zip(centres, measures):
            interval = numbers(m.get("speedup_interval"))
            axes.plot(interval, [y] * len(interval), color=INK, linewidth=0.8)
    axes.axvline(1, color=INK, linewidth=1.1, zorder=3)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axes.set_xlabel("speedup; the line at 1× is the baseline")
    _legend(figure, axes, legend)
    return figure


def _depth(summary: dict[str, Any]) -> Figure | None:
    """Draw accepted tokens by depth, one line per decoder that drafts."""
    from matplotlib.ticker import MaxNLocator

    fractions = {
        name: numbers((decoder.get("overall") or {}).get("accepted_per_depth"))
        for name, decoder in summary["decoders"].items()
    }
    fractions = {name: values for name, values in fractions.items() if any(v > 0 for v in values)}
    if not fractions:
        return None
    legend = [_short(name) for name in fractions]
    figure, axes = _canvas(2.1, legend, 0.5, "share of steps")
    for name, values in fractions.items():
        depths = range(1, len(values) + 1)
        axes.plot(depths, values, label=_short(name), **_line(summary, name))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("minimum number of accepted tokens")
    _legend(figure, axes, legend)
    return figure


def _cost(summary: dict[str, Any]) -> Figure | None:
    """Draw the time of a step relative to the smallest step, one line per context length."""
    from matplotlib import colormaps

    curve = summary.get("curve") or {}
    sizes, contexts = numbers(curve.get("sizes")), curve.get("contexts") or []
    if not sizes or not contexts:
        return None
    legend = [f"{context} tokens" for context in contexts]
    title = "time of a step, relative to one token"
    figure, axes = _canvas(2.1, legend, 0.5, title)
    for i, row in enumerate((curve.get("seconds") or [])[: len(contexts)]):
        ratios = relative(row)
        axes.plot(
            sizes[: len(ratios)],
            ratios,
            color=colormaps["viridis"](0.85 * i / max(1, len(contexts) - 1)),
            marker=MARKERS[i % len(MARKERS)],
            label=legend[i],
        )
    chosen = number((summary.get("draft_size") or {}).get("chosen"))
    if not math.isnan(chosen):
        axes.axvline(chosen, color=INK, linestyle="--", linewidth=1)
        _say(axes, chosen, f"chosen: {chosen:g}", sizes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens verified in the step")
    _legend(figure, axes, legend)
    return figure


def _draft_size(summary: dict[str, Any]) -> Figure | None:
    """Draw the expected speed by tree size, with the chosen size marked."""
    draft_size = summary.get("draft_size") or {}
    sizes, speeds = numbers(draft_size.get("sizes")), numbers(draft_size.get("expected_speed"))
    if not sizes or not any(not math.isnan(s) for s in speeds):
        return None
    name = str(draft_size.get("decoder"))
    figure, axes = _canvas(2.1, [_short(name)], 0.5, "expected tokens/s")
    axes.plot(sizes, speeds, label=_short(name), **_line(summary, name))
    chosen = number(draft_size.get("chosen"))
    if chosen in sizes:
        speed = speeds[sizes.index(chosen)]
        axes.axvline(chosen, color=INK, linestyle="--", linewidth=1)
        axes.margins(y=0.12)
        axes.plot([chosen], [speed], "o", markersize=9, markerfacecolor="none", color=INK)
        _say(axes, chosen, f"chosen: {chosen:g}", sizes)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens verified in the step")
    _legend(figure, axes, [_short(name)])
    return figure


def _say(axes: Axes, x: float, text: str, sizes: list[float]) -> None:
    """Label a vertical line at the bottom, on the side with more room."""
    right = x - min(sizes) < max(sizes) - x
    axes.annotate(
        text,
        xy=(x, 0.05),
        xycoords=("data", "axes fraction"),
        xytext=(4 if right else -4, 0),
        textcoords="offset points",
        ha="left" if right else "right",
    )


def _phases(summary: dict[str, Any]) -> Figure | None:
    """Draw one stacked bar of phase shares per decoder whose steps were timed by phase."""
    fractions = {
        name: [number(phases.get(phase)) for phase in PHASES]
        for name, decoder in summary["decoders"].items()
        if (phases := (decoder.get("overall") or {}).get("phases"))
    }
    if not fractions:
        return None
    size = 0.2
    figure, axes, tops = _bars(list(fractions), list(PHASES), size)
    centres = [top + size / 2 for top in tops]
    starts = [0.0] * len(fractions)
    for i, phase in enumerate(PHASES):
        widths = [0.0 if math.isnan(values[i]) else values[i] for values in fractions.values()]
        colour = PHASE_COLOURS[i]
        axes.barh(
            centres, widths, size, starts, color=colour, edgecolor="white", linewidth=1, label=phase
        )
        for y, start, width in zip(centres, starts, widths):
            if width >= 0.12:  # the label does not fit otherwise
                text = f"{width:.0%}"
                axes.text(start + width / 2, y, text, ha="center", va="center_baseline")
        starts = [start + width for start, width in zip(starts, widths)]
    axes.set_xlim(0, max(1.0, *starts))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_xlabel("share of time after prefill")
    _legend(figure, axes, list(PHASES))
    return figure


def _inline(figure: Figure, name: str, label: str) -> Markup:
    """Return ``figure`` as an SVG element for use inside HTML.

    Drops namespaces, metadata and the document-wide style, and prefixes ids with the chart's name
    because all charts share one page.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            element.set(key.rpartition("}")[2], _own(key, value, name))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", label)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _own(key: str, value: str, name: str) -> str:
    """Prefix an id, or the ids that an attribute refers to, with ``name``."""
    if key == "id":
        return f"{name}-{value}"
    if key.endswith("href"):
        return value.replace("#", f"#{name}-", 1)
    return value.replace("url(#", f"url(#{name}-")

"""Plots of a summary, as SVG for the report."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

Summary = dict[str, Any]
WIDTH, HEIGHT = 8.0, 3.6  # inches, of each plot
METADATA = ("Date", "Creator", "Format", "Type")
NAMESPACE = re.compile(r' xmlns(:\w+)?="[^"]*"')
FEWEST = 3  # values of a setting that make a curve
FEWEST_STEPS = 5  # of a size, for its cost to be drawn
VARIED = ("k", "nodes")  # numeric settings


def plots(summary: Summary) -> str:
    """Return one SVG, to stand in HTML, with every plot that the run has data for."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    drawn = []
    for title, draw in DRAWN.items():
        draw(summary, probe := Figure().add_subplot())
        if probe.has_data():
            drawn.append((title, draw))
    # Text stays text, names may contain dollar signs, and the same summary gives the same bytes.
    style: Any = {"svg.fonttype": "none", "text.parse_math": False, "svg.hashsalt": "report"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH, HEIGHT * len(drawn)), layout="constrained")
        for axes, (title, draw) in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn):
            draw(summary, axes)
            axes.set_title(title, loc="left")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=dict.fromkeys(METADATA))
    svg = text.getvalue()
    return NAMESPACE.sub("", svg[svg.index("<svg") :])  # HTML needs no header and no namespaces


def _speed_over_mat(summary: Summary, axes: Any) -> None:
    for name, entry in summary["decoders"].items():
        overall = entry["overall"]
        axes.plot(overall["mat"], overall["speedup"], "o", label=name)
    axes.axhline(1, color="gray", linewidth=1)
    axes.set(xlabel="MAT: tokens per forward pass", ylabel=f"speed / {summary['baseline']}'s")


def _accepted_by_depth(summary: Summary, axes: Any) -> None:
    for name, entry in summary["decoders"].items():
        if shares := entry["overall"]["accepted_per_depth"]:
            axes.plot(range(1, len(shares) + 1), shares, "o-", markersize=3, label=name)
    axes.set(xlabel="depth in the draft tree", ylabel="share of steps that accept so many tokens")


def _cost_by_size(summary: Summary, axes: Any) -> None:
    plain = summary["decoders"][summary["reference"]]["overall"]["step_seconds"]
    for name, entry in summary["decoders"].items():
        costs = [(size, seconds) for size, seconds, steps in entry["step_costs"]
                 if steps >= FEWEST_STEPS]  # fmt: skip
        if costs and plain and entry["about"]["drafter"]:
            sizes, seconds = zip(*costs)
            axes.plot(sizes, [one / plain for one in seconds], "o-", markersize=3, label=name)
    axes.set(xlabel="tokens verified in a step", ylabel=f"time / a step of {summary['reference']}")
    axes.set_ylim(bottom=0)


def _filling(summary: Summary, axes: Any) -> None:
    vocabulary = summary["model"]["vocab_size"]
    for name, questions in summary["per_question"].items():
        shares = [question["matrix_rows_before"] / vocabulary for question in questions]
        if any(shares):
            axes.plot(range(len(shares)), shares, label=name)
    axes.set(xlabel="questions answered", ylabel="share of tokens with a row in the matrix")


def curves(summary: Summary, setting: str) -> dict[str, list[tuple[int, str]]]:
    """Return the values of a numeric setting and their decoders, by what these have in common.

    Only groups with ``FEWEST`` values or more are returned.
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    given = re.compile(f":{setting}=[^:]*")
    for name, entry in summary["decoders"].items():
        if given.search(name):
            groups.setdefault(given.sub("", name), []).append((entry["about"][setting], name))
    return {label: sorted(found) for label, found in groups.items() if len(found) >= FEWEST}


def _ablation(setting: str, figure: str) -> Callable[[Summary, Any], None]:
    def draw(summary: Summary, axes: Any) -> None:
        for label, points in curves(summary, setting).items():
            values = [summary["decoders"][name]["overall"][figure] for _, name in points]
            axes.plot([value for value, _ in points], values, "o-", label=label)
        axes.set(xlabel=setting, ylabel=figure)

    return draw


DRAWN: dict[str, Callable[[Summary, Any], None]] = {
    "Speed over MAT": _speed_over_mat,
    "Acceptance by depth": _accepted_by_depth,
    "Cost of a step by its size": _cost_by_size,
    "Filling of the matrix": _filling,
    **{
        f"{title} by {setting}": _ablation(setting, figure)
        for setting in VARIED
        for title, figure in (("MAT", "mat"), ("Speedup", "speedup"))
    },
}

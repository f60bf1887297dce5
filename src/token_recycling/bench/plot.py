"""Drawings of trees and cost curves with matplotlib (extra ``plot``)."""

from __future__ import annotations

from pathlib import Path

from token_recycling.drafting.size.costs import CostCurve
from token_recycling.drafting.templates import TreeTemplate
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import write_atomically


def _kind(out: Path) -> str:
    """Return "png" or "svg" by the file name, and select matplotlib's Agg backend.

    Raises:
        TokenRecyclingError: ``out`` has another suffix, or matplotlib is missing.
    """
    kind = out.suffix.lower()
    if kind not in (".png", ".svg"):
        raise TokenRecyclingError(f"{out} must end in .png or .svg")
    try:
        import matplotlib
    except ImportError as error:
        raise TokenRecyclingError(
            "drawing needs matplotlib: pip install 'token-recycling[plot]'"
        ) from error
    matplotlib.use("Agg")
    return kind[1:]


def plot_tree(tree: TreeTemplate, out: Path) -> None:
    """Draw ``tree`` to ``out``, a .png or .svg file, with evenly spaced leaves.

    Raises:
        TokenRecyclingError: ``out`` has another suffix or cannot be written, or matplotlib is
            missing.
    """
    kind = _kind(out)
    from matplotlib.figure import Figure

    paths = ((), *tree.paths)
    inner = {path[:-1] for path in tree.paths}
    leaves = sorted(path for path in paths if path not in inner)  # depth first, left to right
    column = {path: float(i) for i, path in enumerate(leaves)}
    for path in reversed(paths):  # children first: a node is centred above its children
        below = [column[p] for p in tree.paths if p[:-1] == path]
        if below:
            column[path] = sum(below) / len(below)
    width = max(4.0, 0.32 * len(leaves))
    figure = Figure(figsize=(width, 0.9 * (tree.max_depth + 1)))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.9))
    for path in tree.paths:
        x, y = (column[path[:-1]], column[path]), (1 - len(path), -len(path))
        axes.plot(x, y, color="0.75", linewidth=1, zorder=1)
    axes.scatter([column[p] for p in paths], [-len(p) for p in paths], s=130, color="#2a6f97")
    for path in paths:
        label = str(path[-1]) if path else ""
        axes.text(column[path], -len(path), label, color="white", ha="center", va="center", size=7)
    axes.set_title(f"{tree.name}: {tree.nodes - 1} nodes; numbers are candidate ranks", size=9)
    axes.axis("off")
    write_atomically(out, lambda partial: figure.savefig(partial, format=kind, dpi=110))


def plot_costs(curve: CostCurve, out: Path) -> None:
    """Draw step cost over tokens verified, one line per context, to a .png or .svg file.

    Raises:
        TokenRecyclingError: see ``plot_tree``.
    """
    kind = _kind(out)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for context, seconds in zip(curve.contexts, curve.seconds):
        ratios = [cost / seconds[0] for cost in seconds]
        label = f"context {context} (1 token: {seconds[0] * 1e3:.1f} ms)"
        axes.plot(curve.sizes, ratios, marker="o", markersize=3, label=label)
    axes.set_xlabel("tokens verified in a step")
    axes.set_ylabel("cost relative to a step of one token")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    about = curve.about
    title = f"{about.get('model')} {about.get('dtype')}, {about.get('device')}"
    axes.set_title(f"{title}, {about.get('threads')} threads", size=9)
    write_atomically(out, lambda partial: figure.savefig(partial, format=kind, dpi=110))

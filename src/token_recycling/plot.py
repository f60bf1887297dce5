"""Drawing a tree with matplotlib (extra ``plot``)."""

from __future__ import annotations

from pathlib import Path

from token_recycling.errors import TokenRecyclingError
from token_recycling.files import write_atomically
from token_recycling.tree import TreeTemplate


def plot_tree(tree: TreeTemplate, out: Path) -> None:
    """Draw ``tree`` to ``out``, a .png or .svg file; leaves are spread evenly over the width.

    Raises:
        TokenRecyclingError: another kind of file, matplotlib is missing, or it cannot be written.
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
    from matplotlib.figure import Figure

    paths = ((), *tree.paths)
    inner = {path[:-1] for path in tree.paths}
    leaves = sorted(path for path in paths if path not in inner)  # depth first, from the left
    column = {path: float(i) for i, path in enumerate(leaves)}
    for path in reversed(paths):  # children before parents: a node stands over its children
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
    write_atomically(out, lambda partial: figure.savefig(partial, format=kind[1:], dpi=110))

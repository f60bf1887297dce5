"""`token-recycling tree`: list, show and check draft trees."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from token_recycling import defaults
from token_recycling.cli import completion
from token_recycling.cli import options as o
from token_recycling.errors import printable

app = typer.Typer(help="List, show and check draft trees.", rich_markup_mode=None)
Name = Annotated[
    str,
    typer.Argument(help="A shipped tree, chain-N or a JSON file.", autocompletion=completion.tree),
]


@app.command("list")
def list_trees(as_json: o.Json = False) -> None:
    """List the trees shipped with the package."""
    from token_recycling.drafting.templates import TreeTemplate, shipped

    rows = []
    for name in shipped():
        tree = TreeTemplate.load(name)
        rows.append(
            {
                "name": name,
                "nodes": tree.size - 1,
                "depth": tree.max_depth,
                "description": tree.description,
                "provenance": tree.provenance,
            }
        )
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            printable(
                f"{row['name']:10} {row['nodes']:3} nodes, depth {row['depth']}: "
                f"{row['description']}"
            )
        )
    print("chain-N      N nodes, depth N: one branch, always the best candidate")


@app.command("show")
def show(name: Name) -> None:
    """Draw a tree: each node with its rank among its parent's candidates."""
    from token_recycling.drafting.templates import TreeTemplate

    tree = TreeTemplate.load(name)
    print(f"{printable(tree.name)}: {tree.size - 1} nodes and the root, depth {tree.max_depth}")
    for about in filter(None, (tree.description, tree.provenance)):
        print(printable(about))
    print(tree.draw())


@app.command("check")
def check(name: Name, top_k_candidates: o.Candidates = None) -> None:
    """Check a tree file; the error names the invalid path."""
    from token_recycling.drafting.templates import TreeTemplate

    k = defaults.PAPER_CANDIDATES if top_k_candidates is None else top_k_candidates
    tree = TreeTemplate.load(name, k)
    counts = [len(level) for level in tree.levels]
    print(
        f"{printable(tree.name)} is a valid tree: {tree.size - 1} nodes, "
        f"levels {'/'.join(map(str, counts))}, "
        f"needs {tree.max_rank + 1} candidates per token"
    )

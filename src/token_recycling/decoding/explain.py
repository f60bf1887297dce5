"""An account of each step: drafted tokens, their sources and scores, and what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.draft import DraftTree


@dataclass(frozen=True)
class Node:
    """A drafted token of the first row.

    Attributes:
        token: its id.
        parent: index of its parent among the nodes; the root is its own parent.
        score: the drafter's probability that the node is right; None: the drafter gives none.
        source: where the drafter got the token.
        accepted: True when it became part of the text.
    """

    token: int
    parent: int
    score: float | None
    source: str
    accepted: bool


def drafted_nodes(
    drafter: AnyDrafter, rows: Any, draft: DraftTree, accepted: Accepted
) -> list[Node]:
    """Return the nodes of the first row, the root first; none if the row had ended.

    Args:
        drafter: the one that proposed the draft.
        rows: its rows, before it observes the step.
        draft: the verified draft.
        accepted: what was accepted of it.
    """
    emitted = accepted.tokens(0)
    if not emitted:
        return []
    taken = set(accepted.path[0, : len(emitted)].tolist())
    columns = zip(
        draft.tokens[0].tolist(),
        draft.parents[0].tolist(),
        [None] * draft.size if draft.scores is None else draft.scores[0].tolist(),
        drafter.sources(rows, draft),
        draft.valid[0].tolist(),
    )
    return [
        Node(token, parent, score, source, index in taken)
        for index, (token, parent, score, source, valid) in enumerate(columns)
        if valid  # a single row has its valid nodes first, so indices stay right
    ]


def lines(nodes: list[Node], emitted: list[int], text: Callable[[int], str]) -> Iterator[str]:
    """Draw a step's tree as text, one node per line, with its source and score.

    Args:
        nodes: the root first.
        emitted: tokens that the step emitted.
        text: returns a printable form of a token.
    """
    expected = ""
    scores = [node.score for node in nodes[1:] if node.score is not None]
    if scores:
        expected = f", {1 + sum(scores):.2f} expected"
    yield f"{text(nodes[0].token)}  {len(nodes) - 1} drafted, {len(emitted)} emitted{expected}"
    below: dict[int, list[int]] = {}
    for index, node in enumerate(nodes[1:], start=1):
        below.setdefault(node.parent, []).append(index)

    def branch(index: int, indent: str) -> Iterator[str]:
        children = below.get(index, [])
        for child in children:
            node, last = nodes[child], child == children[-1]
            score = "" if node.score is None else f" {node.score:.3f}"
            mark = "  <- accepted" if node.accepted else ""
            yield f"{indent}{'└─' if last else '├─'}{text(node.token)} {node.source}{score}{mark}"
            yield from branch(child, indent + ("  " if last else "│ "))

    yield from branch(0, "")
    yield f"  the model continues with {text(emitted[-1])}"

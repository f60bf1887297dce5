"""What was drafted in each step, from where, how sure the drafter was, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters import Drafter
from token_recycling.tree import DraftTree


@dataclass(frozen=True)
class Node:
    """A drafted token of the first row.

    Attributes:
        token: its id.
        parent: its parent's place among the nodes; the root is its own.
        score: how likely it was said to be right; None: the drafter does not say.
        source: where it came from.
        accepted: the text took it.
    """

    token: int
    parent: int
    score: float | None
    source: str
    accepted: bool


class ExplainedDrafter(Drafter):
    """Another drafter that tells of every step what it drafted; for one row."""

    def __init__(self, drafter: Drafter, tell: Callable[[list[Node], list[int]], None]) -> None:
        """Draft as ``drafter`` does; ``tell`` gets each step's nodes and the tokens emitted."""
        self.drafter, self.tell = drafter, tell
        self.name, self.needs_logits = drafter.name, drafter.needs_logits

    def start(self, prompts: list[list[int]]) -> None:
        """Begin."""
        self.drafter.start(prompts)

    def wants(self, tokens: Tensor) -> Tensor | None:
        """Ask the drafter."""
        return self.drafter.wants(tokens)

    def prime(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:
        """Pass a chunk of the prompt on."""
        self.drafter.prime(tokens, logits, valid)

    def propose(self, roots: Tensor) -> DraftTree:
        """Return the drafter's draft."""
        return self.drafter.propose(roots)

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Tell of the step before the drafter learns from it."""
        emitted = accepted.tokens[0]
        if emitted:
            taken = set(accepted.path[0, : len(emitted)].tolist())
            scores = [None] * draft.tokens.shape[1]
            if draft.scores is not None:
                scores = draft.scores[0].tolist()
            columns = (
                draft.tokens[0].tolist(),
                draft.parents[0].tolist(),
                scores,
                self.drafter.sources(draft),
                draft.valid[0].tolist(),
            )
            nodes = [
                Node(token, parent, score, source, place in taken)
                for place, (token, parent, score, source, valid) in enumerate(zip(*columns))
                if valid  # nothing valid stands behind what is not, in one row
            ]
            self.tell(nodes, emitted)
        self.drafter.observe(draft, logits, accepted)


def lines(nodes: list[Node], emitted: list[int], text: Callable[[int], str]) -> Iterator[str]:
    """Draw a step's tree, a node a line, each with its source and its score.

    Args:
        nodes: the root first.
        emitted: tokens of the step.
        text: shows a token.
    """
    expected = ""
    scores = [node.score for node in nodes[1:] if node.score is not None]
    if scores:
        expected = f", {1 + sum(scores):.2f} expected"
    yield f"{text(nodes[0].token)}  {len(nodes) - 1} drafted, {len(emitted)} emitted{expected}"
    below: dict[int, list[int]] = {}
    for place, node in enumerate(nodes[1:], start=1):
        below.setdefault(node.parent, []).append(place)

    def branch(place: int, indent: str) -> Iterator[str]:
        children = below.get(place, [])
        for child in children:
            node, last = nodes[child], child == children[-1]
            score = "" if node.score is None else f" {node.score:.3f}"
            mark = "  <- accepted" if node.accepted else ""
            yield f"{indent}{'└─' if last else '├─'}{text(node.token)} {node.source}{score}{mark}"
            yield from branch(child, indent + ("  " if last else "│ "))

    yield from branch(0, "")
    yield f"  the model goes on with {text(emitted[-1])}"

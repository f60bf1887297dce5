"""Variants: the decoding methods that a benchmark compares, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from token_recycling import defaults
from token_recycling.drafting.prompt_lookup import LOOKUP_TOKENS, PromptLookupDrafter
from token_recycling.drafting.registry import names
from token_recycling.errors import TokenRecyclingError
from token_recycling.options import Options

BASELINE, LOOKUP, AUTO = "generate", "generate-pld", "auto"
DEFAULT = (BASELINE, LOOKUP, "prompt-lookup", "paper", AUTO)
# Drafters without a matrix; None stands for ``model.generate``.
NOT_RECYCLED = (None, "none", "prompt-lookup")
MODES = {"": None, "graph": True, "no-graph": False}


@dataclass(frozen=True)
class Variant:
    """A decoding method with its settings.

    Attributes:
        name: unique within a run.
        drafter: name of the drafter; None for ``model.generate``.
        lookup: True for ``model.generate`` with prompt lookup.
        nodes: nodes below the root of every draft; None: chosen automatically, or a whole tree.
        tree: see ``Options``.
        k: candidates per token.
        temperature: 0 is greedy.
        graph: see ``Options``.
        cold: the matrix is emptied before each question.
    """

    name: str
    drafter: str | None = None
    lookup: bool = False
    nodes: int | None = None
    tree: str | None = None
    k: int = defaults.CANDIDATES
    temperature: float = 0.0
    graph: bool | None = None
    cold: bool = False

    @property
    def recycles(self) -> bool:
        """True if it keeps a matrix."""
        return self.drafter not in NOT_RECYCLED

    def options(self) -> Options:
        """Return the options of its recycler; a tree is cut to the ranks below ``k``.

        Raises:
            TokenRecyclingError: they cannot be used.
        """
        given = {"drafter": self.drafter or "none", "nodes": self.nodes, "k": self.k}
        options = Options.of({**given, "graph": self.graph, "tree": self.tree})
        template = options.template(max(self.k, defaults.CANDIDATES))
        if template is None:
            return options
        tree = template.limited(self.k)
        if not tree.paths:
            raise TokenRecyclingError(
                f"tree {tree.name} has no nodes left with k={self.k}; choose another tree"
            )
        return replace(options, tree=tree)

    @property
    def automatic(self) -> bool:
        """True if the size of its drafts is chosen automatically."""
        return self.drafter == defaults.DRAFTER and self.nodes is None


def parse(spec: str) -> Variant:
    """Read ``generate``, ``generate-pld``, ``auto``, or ``DRAFTER`` with ``@NODES`` or ``@TREE``.

    Without nodes, ``adaptive`` has 80 of them. All except the first two may be
    followed by ``+graph`` or ``+no-graph``.

    Raises:
        TokenRecyclingError: there is no such decoder.
    """
    if spec in (BASELINE, LOOKUP):
        return Variant(spec, lookup=spec == LOOKUP)
    ours, _, mode = spec.partition("+")
    drafter, _, shape = (defaults.DRAFTER, "", AUTO) if ours == AUTO else ours.partition("@")
    if drafter not in names() or mode not in MODES:
        known = ", ".join([BASELINE, LOOKUP, AUTO, *names()])
        raise TokenRecyclingError(
            f"no such decoder: {spec!r}; choose {known}, DRAFTER@NODES or DRAFTER@TREE; "
            "all but the first two may end in +graph or +no-graph"
        )
    nodes, tree = _shape(drafter, shape)
    k = defaults.candidates_for(drafter)
    return Variant(spec, drafter, nodes=nodes, tree=tree, k=k, graph=MODES[mode])


def _shape(drafter: str, text: str) -> tuple[int | None, str | None]:
    """Return nodes and tree of what follows the @ in a decoder's name, which may be nothing."""
    if text.isdecimal():
        return int(text), None
    if drafter == PromptLookupDrafter.name and not text:
        return LOOKUP_TOKENS, None
    if drafter == defaults.DRAFTER and text != AUTO:
        if text:
            raise TokenRecyclingError(f"{drafter} shapes its own trees; write {drafter}@NODES")
        return defaults.MOST_NODES, None
    return None, text if text not in ("", AUTO) else None


def select(specs: Sequence[str], *, temperature: float = 0.0, cold: bool = False) -> list[Variant]:
    """Return the variants of ``specs``; the baseline is always among them, and the first.

    Raises:
        TokenRecyclingError: a decoder or tree is unknown.
    """
    return [
        replace(parse(spec), temperature=temperature, cold=cold)
        for spec in dict.fromkeys([BASELINE, *specs])
    ]

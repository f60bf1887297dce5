"""The options of a recycler, each stated once; constructors, command line and engines read them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from token_recycling import defaults
from token_recycling.draft_size.costs import CostCurve
from token_recycling.drafters import AnyDrafter, Drafter
from token_recycling.errors import TokenRecyclingError
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.tree import TreeTemplate

GRAPHS = {"auto": None, "fused": True, "readable": False}  # of the option that was called engine
# (old name, new name, what the old value means)
RENAMED: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("engine", "graph", lambda value: _graph(value)),
    ("exact_logits", "float32_logits", lambda value: value),
)


@dataclass(frozen=True)
class Options:
    """How to draft, verify and share a model.

    Attributes:
        drafter: "adaptive", "paper", "prompt-lookup", "none", a registered name, or an object.
        tree: "auto": as many nodes as pay, chosen while decoding; or a shipped tree, "ranked-N",
            "chain-N", a JSON file or a template. None: "auto".
        k: candidates kept per token; None: 8, or those of ``matrix``.
        matrix: the adjacency matrix to start from, or its file.
        costs: what steps cost here, for ``tree="auto"``. None: what ``token-recycling tune``
            measured for this model and machine, else a guess; steps correct both.
        graph: True: steps are compiled and, on a GPU, captured as one graph each; what a graph
            cannot hold goes through the eager loop, with the same output. False: never. None: on
            CUDA.
        float32_logits: compute the LM head in float32, for models in half precision: rounded
            logits tie, and which of them wins is up to the kernel (see ``lm_head.Float32Head``).
        queue: calls from several threads wait for each other, in their order. False: while one is
            answered, ``generate`` of an enabled model decodes others plainly, and other calls
            raise.
        strict: raise where the model cannot be verified by tree attention, instead of warning and
            decoding plainly.
    """

    drafter: str | AnyDrafter = defaults.DRAFTER
    tree: str | Path | TreeTemplate | None = None
    k: int | None = None
    matrix: AdjacencyMatrix | str | Path | None = None
    costs: CostCurve | None = None
    graph: bool | None = None
    float32_logits: bool = False
    queue: bool = True
    strict: bool = False

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Check options; old names give a ``DeprecationWarning``.

        Raises:
            TokenRecyclingError: a value is of the wrong kind.
            TypeError: there is no such option.
        """
        values = dict(given)
        for old, new, convert in RENAMED:
            if old in values:
                warnings.warn(f"the option {old} is now {new}", DeprecationWarning, stacklevel=3)
                values.setdefault(new, convert(values.pop(old)))
        names = [one.name for one in fields(cls)]
        for name in values:
            if name not in names:
                raise TypeError(f"there is no option {name!r}; there are {', '.join(names)}")
        options = cls(**values)
        options._check()
        return options

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of all options, old ones included."""
        return {one.name for one in fields(cls)} | {old for old, _, _ in RENAMED}

    def _check(self) -> None:
        if not isinstance(self.drafter, str | Drafter):
            raise TokenRecyclingError("a drafter is a name or an object of a Drafter class")
        if not (self.k is None or (isinstance(self.k, Integral) and not isinstance(self.k, bool))):
            raise TokenRecyclingError(f"k is {self.k!r}; it must be a whole number")
        if not (self.matrix is None or isinstance(self.matrix, str | Path | AdjacencyMatrix)):
            raise TokenRecyclingError(
                f"matrix is {self.matrix!r}; give an AdjacencyMatrix or its file"
            )
        if not (self.tree is None or isinstance(self.tree, str | Path | TreeTemplate)):
            raise TokenRecyclingError("a tree is a name, a file or a TreeTemplate")
        if self.graph not in (None, True, False):
            raise TokenRecyclingError(f"graph is {self.graph!r}; it must be True, False or None")

    @property
    def automatic(self) -> bool:
        """True when the size of drafts follows machine and text."""
        return self.tree is None or self.tree == defaults.TREE


def _graph(engine: Any) -> bool | None:
    if engine not in GRAPHS:
        raise TokenRecyclingError(f"engine is {engine!r}; set graph to True, False or None")
    return GRAPHS[engine]

"""The options of a recycler, shared by constructors, the command line and the engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, TypedDict

import torch

from skinny_kernels.modes import ordinary_tensors
from token_recycling import defaults
from token_recycling.drafting.base import PROMPTS, AnyDrafter, Drafter
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.registry import SHAPE_THEIR_OWN, check_name
from token_recycling.drafting.templates import TreeTemplate
from token_recycling.errors import TokenRecyclingError, unknown_option


class OptionArguments(TypedDict, total=False):
    """``Options`` as keyword arguments, for type checkers and editors."""

    drafter: str | AnyDrafter
    nodes: int | None
    tree: str | Path | TreeTemplate | None
    k: int | None
    matrix: AdjacencyMatrix | str | Path | None
    prompts: str | None
    graph: bool | None
    float32_logits: bool
    queue: bool
    strict: bool


@dataclass(frozen=True)
class Options:
    """How to draft, verify and serve several threads.

    Attributes:
        drafter: "adaptive", "paper", "prompt-lookup", "none", a registered name, or a ``Drafter``.
        nodes: nodes of every draft, below the root; None: chosen automatically, draft by draft.
        tree: for drafters that fill a tree of fixed shape ("paper" and registered ones): a shipped
            tree, "chain-N", a JSON file or a template. None: the published tree, or if ``nodes`` is
            given that many of the paths that text takes most often.
        k: candidates kept per token; None: those of ``matrix``, or else 12, or 8 for "paper".
        matrix: the adjacency matrix to start from, or its file; a ``Drafter`` object uses its own.
        prompts: what a prompt's logits teach: "whole": every token that the drafter selects,
            "part": of these only the last ones, as many as cost at most 5 % of the reading, or
            "none". None: "part", or "whole" for "paper" and for a ``Drafter`` that says so.
        graph: True: capture steps as CUDA graphs; what cannot be captured runs in the eager loop,
            with the same output. False: always eager. None: True on CUDA, else False. On a CPU,
            True runs the steps that a GPU would capture, more slowly than the eager loop.
        float32_logits: compute the LM head in float32, for models in half precision, where rounded
            logits can tie and the kernel decides which one wins (see ``lm_head.Float32Head``).
        queue: calls from several threads wait for each other, first come, first served. False:
            during a call, ``generate`` of an enabled model falls back to standard decoding, and
            other calls raise.
        strict: raise when the model or a call cannot be served by draft trees, instead of warning
            and falling back to standard decoding.
    """

    drafter: str | AnyDrafter = defaults.DRAFTER
    nodes: int | None = None
    tree: str | Path | TreeTemplate | None = None
    k: int | None = None
    matrix: AdjacencyMatrix | str | Path | None = None
    prompts: str | None = None
    graph: bool | None = None
    float32_logits: bool = False
    queue: bool = True
    strict: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Check ``given`` options and build from them.

        Raises:
            TokenRecyclingError: there is no such option, or a value has the wrong type.
        """
        names = cls.names()
        for name in given:
            if name not in names:
                raise unknown_option(name, names)
        options = cls(**given)
        options._check()
        return options

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options."""
        return [field.name for field in fields(cls)]

    def _check(self) -> None:
        if not isinstance(self.drafter, str | Drafter):
            kind = type(self.drafter).__name__
            raise TokenRecyclingError(f"drafter has type {kind}; it must be a name or a Drafter")
        if isinstance(self.drafter, str):
            check_name(self.drafter)
        elif not isinstance(getattr(self.drafter, "name", None), str):
            kind = type(self.drafter).__name__
            raise TokenRecyclingError(f"the drafter {kind} has no name; give its class a name")
        for name in ("k", "nodes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
                raise TokenRecyclingError(f"{name} is {value!r}; it must be an integer")
        if self.nodes is not None and not 1 <= self.nodes <= defaults.LARGEST_DRAFT:
            raise TokenRecyclingError(
                f"nodes is {self.nodes}; it must be between 1 and {defaults.LARGEST_DRAFT}"
            )
        if self.nodes is not None and self.drafter == NoDrafter.name:
            raise TokenRecyclingError("the drafter none drafts nothing; leave nodes out")
        if self.tree is not None and not self.fills_tree:
            raise TokenRecyclingError(
                f"the drafter {self.drafter_name} takes no tree; give a number of nodes, or use "
                'the drafter "paper"'
            )
        if not (self.matrix is None or isinstance(self.matrix, str | Path | AdjacencyMatrix)):
            raise TokenRecyclingError(
                f"matrix is {self.matrix!r}; give an AdjacencyMatrix or its file"
            )
        if not (self.tree is None or isinstance(self.tree, str | Path | TreeTemplate)):
            kind = type(self.tree).__name__
            raise TokenRecyclingError(
                f"tree has type {kind}; it must be a name, a file or a TreeTemplate"
            )
        if self.prompts not in (None, *PROMPTS):
            raise TokenRecyclingError(
                f"prompts is {self.prompts!r}; choose from {', '.join(PROMPTS)}"
            )
        if self.prompts is not None and not isinstance(self.drafter, str):
            raise TokenRecyclingError("prompts is given for a Drafter object; set its own")
        if not (self.graph is None or isinstance(self.graph, bool)):
            raise TokenRecyclingError(f"graph is {self.graph!r}; it must be True, False or None")
        for name in ("float32_logits", "queue", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise TokenRecyclingError(
                    f"{name} is {getattr(self, name)!r}; it must be True or False"
                )

    def candidates(self, vocab_size: int) -> int:
        """Return how many candidates a new matrix keeps per token."""
        if self.k is not None:
            return self.k
        return min(defaults.candidates_for(self.drafter), vocab_size)

    def load_matrix(self) -> AdjacencyMatrix | None:
        """Return the given matrix, loaded if it is a file, or None.

        Raises:
            TokenRecyclingError: the file cannot be read, or its k differs from the given one.
        """
        matrix = self.matrix
        if not isinstance(self.drafter, str):
            matrix = self.drafter.matrix or matrix
        if isinstance(matrix, str | Path):
            with ordinary_tensors():
                matrix = AdjacencyMatrix.load(matrix)
        if matrix is not None and self.k is not None and self.k != matrix.k:
            raise TokenRecyclingError(f"the matrix keeps k={matrix.k} candidates, not {self.k}")
        return matrix

    def template(self, k: int) -> TreeTemplate | None:
        """Return the tree for ``k`` candidates per token; None for drafters that shape their own.

        Raises:
            TokenRecyclingError: there is no such tree, or it needs more candidates.
        """
        if not self.fills_tree:
            return None
        if isinstance(self.tree, TreeTemplate):
            self.tree.check_k(k)
            return self.tree
        shipped = "paper" if self.nodes is None else "ranked"
        return TreeTemplate.load(shipped if self.tree is None else self.tree, k)

    @property
    def drafter_name(self) -> str:
        """The drafter's name."""
        return self.drafter if isinstance(self.drafter, str) else self.drafter.name

    @property
    def fills_tree(self) -> bool:
        """True if the drafter fills a tree of fixed shape."""
        return isinstance(self.drafter, str) and self.drafter not in SHAPE_THEIR_OWN

    def graphs_on(self, device: torch.device) -> bool:
        """Return whether steps on ``device`` run as graphs where they can."""
        return device.type == "cuda" if self.graph is None else bool(self.graph)

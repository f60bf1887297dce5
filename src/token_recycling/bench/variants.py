"""Variants: the decoding methods that a benchmark compares, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from token_recycling import defaults
from token_recycling.drafting.prompt_lookup import LOOKUP_TOKENS, PromptLookupDrafter
from token_recycling.drafting.registry import names
from token_recycling.errors import TokenRecyclingError
from token_recycling.options import Options

BASELINE, LOOKUP, AUTO = "generate", "generate-pld", "auto"
DEFAULT = (BASELINE, LOOKUP, "prompt-lookup", "paper", AUTO)
# Drafters without a matrix; None stands for ``model.generate``.
NOT_RECYCLED = (None, "none", "prompt-lookup")
SWITCH = {"yes": True, "no": False}
# What may follow a decoder's name, and how it is read.
SETTINGS: dict[str, Callable[[str], Any]] = {
    "nodes": int,
    "tree": str,
    "k": int,
    "matrix": str,
    "graph": SWITCH.__getitem__,
}
NEXT = re.compile(r":(?=[a-z]+=)")  # a path may contain colons


@dataclass(frozen=True)
class Variant:
    """A decoding method with its settings.

    Attributes:
        name: unique within a run.
        drafter: name of the drafter; None for ``model.generate``.
        lookup: True for ``model.generate`` with prompt lookup.
        nodes: nodes below the root of every draft; None: chosen automatically, or a whole tree.
        tree: see ``Options``.
        k: candidates per token; None: those of ``matrix``.
        matrix: file that it starts from.
        temperature: 0 is greedy.
        graph: see ``Options``.
        cold: the matrix is emptied before each question.
    """

    name: str
    drafter: str | None = None
    lookup: bool = False
    nodes: int | None = None
    tree: str | None = None
    k: int | None = None
    matrix: str | None = None
    temperature: float = 0.0
    graph: bool | None = None
    cold: bool = False

    @property
    def recycles(self) -> bool:
        """True if it keeps a matrix."""
        return self.drafter not in NOT_RECYCLED

    def options(self) -> Options:
        """Return the options of its recycler.

        Raises:
            TokenRecyclingError: they cannot be used.
        """
        names = ("nodes", "tree", "k", "matrix", "graph")
        given = {name: getattr(self, name) for name in names}
        return Options.of({"drafter": self.drafter or "none", **given})

    def check(self) -> int:
        """Check the options, files included; return the candidates per token.

        Raises:
            TokenRecyclingError: they cannot be used.
        """
        options = self.options()
        matrix = options.load_matrix()
        k = self.k if matrix is None else matrix.k
        k = defaults.candidates_for(self.drafter or "none") if k is None else k
        try:
            options.template(k)
        except TokenRecyclingError as error:
            raise TokenRecyclingError(f"{self.name}: {error}") from error
        if self.cold and self.matrix is not None:
            raise TokenRecyclingError(
                f"{self.name}: --cold would empty the matrix before each question; leave one out"
            )
        return k

    @property
    def automatic(self) -> bool:
        """True if the size of its drafts is chosen automatically."""
        return self.drafter == defaults.DRAFTER and self.nodes is None


def parse(spec: str) -> Variant:
    """Read ``generate``, ``generate-pld``, or ``auto`` or a drafter with ``:SETTING=VALUE`` …

    Without nodes, ``adaptive`` has 80 of them.

    Raises:
        TokenRecyclingError: there is no such decoder or setting.
    """
    name, *given = NEXT.split(spec)
    if spec in (BASELINE, LOOKUP):
        return Variant(spec, lookup=spec == LOOKUP)
    drafter = defaults.DRAFTER if name == AUTO else name
    if drafter not in names():
        known = ", ".join([BASELINE, LOOKUP, AUTO, *names()])
        raise TokenRecyclingError(
            f"no such decoder: {spec!r}; choose {known}; all but the first two may be followed by "
            f"settings, such as paper:tree=chain-8:k=4"
        )
    settings: dict[str, Any] = {}
    for text in given:
        key, _, value = text.partition("=")
        if key not in SETTINGS or key in settings:
            reason = "is given twice" if key in settings else "is no setting"
            raise TokenRecyclingError(
                f"{spec}: {key} {reason}; choose from {', '.join(SETTINGS)}, each once"
            )
        try:
            settings[key] = SETTINGS[key](value)
        except (ValueError, KeyError) as error:
            kind = "a whole number" if SETTINGS[key] is int else "yes or no"
            raise TokenRecyclingError(f"{spec}: {key} must be {kind}") from error
    if drafter in NOT_RECYCLED and {"k", "matrix"} & settings.keys():
        raise TokenRecyclingError(f"{spec}: {drafter} keeps no matrix; leave k and matrix out")
    if name == AUTO and "nodes" in settings:
        raise TokenRecyclingError(f"{AUTO} chooses the nodes; write {drafter}:nodes=N")
    most = {defaults.DRAFTER: defaults.MOST_NODES, PromptLookupDrafter.name: LOOKUP_TOKENS}
    variant = Variant(spec, drafter, nodes=most.get(name))
    if not {"k", "matrix"} & settings.keys():
        variant = replace(variant, k=defaults.candidates_for(drafter))
    return replace(variant, **settings)


def select(specs: Sequence[str], *, temperature: float = 0.0, cold: bool = False) -> list[Variant]:
    """Return the variants of ``specs``; the baseline is always among them, and the first.

    Raises:
        TokenRecyclingError: a decoder or setting is unknown.
    """
    return [
        replace(parse(spec), temperature=temperature, cold=cold)
        for spec in dict.fromkeys([BASELINE, *specs])
    ]

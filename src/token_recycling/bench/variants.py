"""Variants: the decoding methods that a benchmark compares, by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from token_recycling import defaults
from token_recycling.drafting.prompt_lookup import LOOKUP_TOKENS, PromptLookupDrafter
from token_recycling.drafting.registry import names
from token_recycling.errors import TokenRecyclingError
from token_recycling.options import Options

BASELINE, LOOKUP, PLAIN, AUTO = "generate", "generate-pld", "none", "auto"
DEFAULT = (BASELINE, LOOKUP, "prompt-lookup", "paper", AUTO)
# Drafters without a matrix; None stands for ``model.generate``.
NOT_RECYCLED = (None, PLAIN, "prompt-lookup")
SWITCH = {"yes": True, "no": False}
# What may follow a decoder's name, and how it is read.
SETTINGS: dict[str, Callable[[str], Any]] = {
    "nodes": int,
    "tree": str,
    "k": int,
    "matrix": str,
    "graph": SWITCH.__getitem__,
    "prompts": str,
    "cold": SWITCH.__getitem__,
}
NEXT = re.compile(r":(?=[a-z]+=)")  # a path may contain colons
OR = "|"  # between several values of a setting


@dataclass(frozen=True)
class Variant:
    """A decoding method with its settings.

    Attributes:
        name: unique within a run.
        drafter: name of the drafter; None for ``model.generate``.
        lookup: True for ``model.generate`` with prompt lookup.
        nodes, tree, k, matrix, graph, prompts: see ``Options``.
        cold: every question starts from the matrix that the run started from.
    """

    name: str
    drafter: str | None = None
    lookup: bool = False
    nodes: int | None = None
    tree: str | None = None
    k: int | None = None
    matrix: str | None = None
    graph: bool | None = None
    prompts: str | None = None
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
        given = self.settings() | {"drafter": self.drafter or PLAIN}
        return Options.of({name: value for name, value in given.items() if name != "cold"})

    def check(self) -> int:
        """Check the options, files included; return the candidates per token.

        Raises:
            TokenRecyclingError: they cannot be used.
        """
        options = self.options()
        matrix = options.load_matrix()
        k = self.k if matrix is None else matrix.k
        k = defaults.candidates_for(self.drafter) if k is None else k
        try:
            options.template(k)
        except TokenRecyclingError as error:
            raise TokenRecyclingError(f"{self.name}: {error}") from error
        return k

    def settings(self) -> dict[str, Any]:
        """Return the drafter and the settings, by name."""
        return {name: getattr(self, name) for name in ("drafter", *SETTINGS)}


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
    learning = {"k", "matrix", "prompts", "cold"} & settings.keys()
    if drafter in NOT_RECYCLED and learning:
        raise TokenRecyclingError(
            f"{spec}: {drafter} keeps no matrix; leave {sorted(learning)[0]} out"
        )
    if name == AUTO and "nodes" in settings:
        raise TokenRecyclingError(f"{AUTO} chooses the nodes; write {drafter}:nodes=N")
    most = {defaults.DRAFTER: defaults.AUTOMATIC_NODES, PromptLookupDrafter.name: LOOKUP_TOKENS}
    settings.setdefault("nodes", most.get(name))
    if "matrix" not in settings:
        settings.setdefault("k", defaults.candidates_for(drafter))
    return Variant(spec, drafter, **settings)


def expanded(spec: str) -> list[str]:
    """Return the decoders of ``spec``, in which settings may have several values.

    ``paper:k=2|4:nodes=8`` stands for ``paper:nodes=8:k=2`` and ``paper:nodes=8:k=4``: settings are
    put in the order of ``SETTINGS``, so that no decoder is there twice.
    """
    name, *given = NEXT.split(spec)
    order = list(SETTINGS)
    parts = [text.partition("=") for text in given]
    parts.sort(key=lambda part: order.index(part[0]) if part[0] in order else len(order))
    alternatives = (
        [f"{key}{eq}{value}" for value in values.split(OR)] for key, eq, values in parts
    )
    return [":".join([name, *settings]) for settings in product(*alternatives)]


def select(specs: Sequence[str]) -> list[Variant]:
    """Return the variants of ``specs``; the baseline is always among them, and the first.

    Raises:
        TokenRecyclingError: a decoder or setting is unknown.
    """
    every = [one for spec in specs for one in expanded(spec)]
    return [parse(spec) for spec in dict.fromkeys([BASELINE, *every])]

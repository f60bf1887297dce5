"""Variants: the decoding methods that a benchmark compares, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from token_recycling import defaults
from token_recycling.drafters import names
from token_recycling.errors import TokenRecyclingError
from token_recycling.tree import TreeTemplate

GENERATE, LOOKUP, AUTO = "generate", "generate-pld", "auto"
LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens, as Spec-Bench sets it
DEFAULT = (GENERATE, LOOKUP, "prompt-lookup", "paper", AUTO)
# Drafters without a matrix; None stands for ``model.generate``.
NOT_RECYCLED = (None, "none", "prompt-lookup")
FIXED_TREE = "paper"  # for a drafter named without a tree
MODES = {"": None, "graph": True, "no-graph": False}
SWEEPS = ("k", "tree", "temperature", "start")
STARTS = ("hot", "cold")
TEMPERATURES = "a temperature must be 0 or from 0.00001 to 100"


@dataclass(frozen=True)
class Variant:
    """A decoding method with its settings.

    Attributes:
        name: unique within a run.
        drafter: name of the drafter; None for ``model.generate``.
        lookup: True for ``model.generate`` with prompt lookup.
        tree: "auto", the name of a tree, or a file.
        k: candidates per token.
        temperature: 0 is greedy.
        graph: see ``Options``.
        start: "hot" keeps the matrix between questions, "cold" empties it before each.
        baseline: name of the variant that it is compared with.
    """

    name: str
    drafter: str | None = None
    lookup: bool = False
    tree: str = FIXED_TREE
    k: int = defaults.CANDIDATES
    temperature: float = 0.0
    graph: bool | None = None
    start: str = "hot"
    baseline: str = GENERATE

    @property
    def recycles(self) -> bool:
        """True if it keeps a matrix."""
        return self.drafter not in NOT_RECYCLED

    def template(self) -> TreeTemplate:
        """Load the tree, without nodes whose rank is beyond ``k`` candidates.

        Raises:
            TokenRecyclingError: there is no such tree, or no node is left.
        """
        tree = TreeTemplate.load(self.tree, max(self.k, defaults.CANDIDATES)).limited(self.k)
        if not tree.paths:
            raise TokenRecyclingError(
                f"tree {self.tree} has no nodes left with k={self.k}; choose a larger k"
            )
        return replace(tree, name=self.tree)


def parse(spec: str) -> Variant:
    """Read ``generate``, ``generate-pld``, ``auto``, ``DRAFTER`` or ``DRAFTER@TREE``.

    A drafter without a tree uses the published one: ``paper`` with its 80 nodes. All except the
    first two may be followed by ``+graph`` or ``+no-graph``.

    Raises:
        TokenRecyclingError: there is no such decoder.
    """
    if spec in (GENERATE, LOOKUP):
        return Variant(spec, lookup=spec == LOOKUP)
    ours, _, mode = spec.partition("+")
    drafter, _, tree = (defaults.DRAFTER, "", AUTO) if ours == AUTO else ours.partition("@")
    if drafter not in names() or mode not in MODES:
        known = ", ".join([GENERATE, LOOKUP, AUTO, *names()])
        raise TokenRecyclingError(
            f"no such decoder: {spec!r}; choose {known} or DRAFTER@TREE; "
            "all but the first two may end in +graph or +no-graph"
        )
    k = defaults.candidates_for(drafter)
    return Variant(spec, drafter, tree=tree or FIXED_TREE, k=k, graph=MODES[mode])


def is_temperature(value: float) -> bool:
    """Return True for 0 and for temperatures in the supported range (see ``TEMPERATURES``)."""
    return value == 0 or 1e-5 <= value <= 100


def read_sweep(text: str) -> tuple[str, list[Any]]:
    """Read ``k=2,4``, ``tree=paper,auto``, ``temperature=0,0.7`` or ``start=cold,hot``.

    Raises:
        TokenRecyclingError: ``text`` is none of these.
    """
    name, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if name not in SWEEPS or not values:
        raise TokenRecyclingError(
            f"--sweep is {text!r}; write one of {', '.join(f'{name}=A,B' for name in SWEEPS)}"
        )
    kinds: Mapping[str, Any] = {"k": int, "temperature": float}
    try:
        read: list[Any] = [kinds.get(name, str)(value) for value in values]
    except ValueError as error:
        form = "whole numbers" if name == "k" else "numbers"
        raise TokenRecyclingError(f"--sweep is {text!r}; the values must be {form}") from error
    if name == "start" and not set(read) <= set(STARTS):
        raise TokenRecyclingError(f"--sweep is {text!r}; start must be cold or hot")
    if name == "temperature" and not all(map(is_temperature, read)):
        raise TokenRecyclingError(f"--sweep is {text!r}; {TEMPERATURES}")
    if name == "k" and min(read) < 1:
        raise TokenRecyclingError(f"--sweep is {text!r}; k must be 1 or more")
    return name, list(dict.fromkeys(read))


def expand(
    specs: Sequence[str],
    sweeps: Mapping[str, Sequence[Any]],
    *,
    temperature: float = 0.0,
    cold: bool = False,
) -> list[Variant]:
    """Return the variants of ``specs`` with every combination of the swept values.

    Sweeps over k, start and tree apply to variants that keep a matrix, temperature to all. The
    baseline, ``model.generate`` at each temperature, is always included and comes first.

    Raises:
        TokenRecyclingError: a decoder or tree is unknown, or two variants have the same name.
    """
    common: dict[str, Any] = {"temperature": temperature, "start": "cold" if cold else "hot"}
    found: dict[str, Variant] = {}
    for spec in dict.fromkeys([GENERATE, *specs]):
        variant = replace(parse(spec), **common)
        swept = [name for name in sweeps if _concerns(name, variant)]
        for values in product(*(sweeps[name] for name in swept)):
            one = _set(variant, dict(zip(swept, values)))
            if found.setdefault(one.name, one) != one:
                raise TokenRecyclingError(
                    f"two decoders would both be called {one.name}; remove one"
                )
    return list(found.values())


def _concerns(sweep: str, variant: Variant) -> bool:
    return sweep == "temperature" or variant.recycles


def _set(variant: Variant, values: dict[str, Any]) -> Variant:
    """Return the variant with the swept values set and added to its name."""
    name = variant.name
    if "tree" in values:
        name = AUTO if values["tree"] == AUTO else f"{variant.drafter}@{values['tree']}"
        if values["tree"] == AUTO and variant.drafter != defaults.DRAFTER:
            name = f"{variant.drafter}@{AUTO}"
        mode = variant.name.partition("+")[2]
        name += f"+{mode}" if mode else ""
    if "k" in values:
        name += f" k={values['k']}"
    if "start" in values:
        name += f" {values['start']}"
    baseline = variant.baseline
    if "temperature" in values:
        name += f" T={values['temperature']:g}"
        baseline += f" T={values['temperature']:g}"
    return replace(variant, name=name, baseline=baseline, **values)

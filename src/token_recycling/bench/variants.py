"""Variants: the decoding methods that a benchmark compares, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from token_recycling import defaults
from token_recycling.drafting.prompt_lookup import LOOKUP_TOKENS, PromptLookupDrafter
from token_recycling.drafting.registry import SHAPE_THEIR_OWN, names
from token_recycling.errors import TokenRecyclingError
from token_recycling.options import Options

GENERATE, LOOKUP, AUTO = "generate", "generate-pld", "auto"
DEFAULT = (GENERATE, LOOKUP, "prompt-lookup", "paper", AUTO)
# Drafters without a matrix; None stands for ``model.generate``.
NOT_RECYCLED = (None, "none", "prompt-lookup")
MODES = {"": None, "graph": True, "no-graph": False}
SWEEPS = ("k", "nodes", "tree", "temperature", "start")
STARTS = ("hot", "cold")
TEMPERATURES = "a temperature must be 0 or from 0.00001 to 100"


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
        start: "hot" keeps the matrix between questions, "cold" empties it before each.
        baseline: name of the variant that it is compared with.
    """

    name: str
    drafter: str | None = None
    lookup: bool = False
    nodes: int | None = None
    tree: str | None = None
    k: int = defaults.CANDIDATES
    temperature: float = 0.0
    graph: bool | None = None
    start: str = "hot"
    baseline: str = GENERATE

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
                f"tree {tree.name} has no nodes left with k={self.k}; choose a larger k"
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
    if spec in (GENERATE, LOOKUP):
        return Variant(spec, lookup=spec == LOOKUP)
    ours, _, mode = spec.partition("+")
    drafter, _, shape = (defaults.DRAFTER, "", AUTO) if ours == AUTO else ours.partition("@")
    if drafter not in names() or mode not in MODES:
        known = ", ".join([GENERATE, LOOKUP, AUTO, *names()])
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


def is_temperature(value: float) -> bool:
    """Return True for 0 and for temperatures in the supported range (see ``TEMPERATURES``)."""
    return value == 0 or 1e-5 <= value <= 100


def read_sweep(text: str) -> tuple[str, list[Any]]:
    """Read ``k=2,4``, ``nodes=8,16``, ``tree=A,B``, ``temperature=0,0.7`` or ``start=cold,hot``.

    Raises:
        TokenRecyclingError: ``text`` is none of these.
    """
    name, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    if name not in SWEEPS or not values:
        raise TokenRecyclingError(
            f"--sweep is {text!r}; write one of {', '.join(f'{name}=A,B' for name in SWEEPS)}"
        )
    kinds: Mapping[str, Any] = {"k": int, "nodes": int, "temperature": float}
    try:
        read: list[Any] = [kinds.get(name, str)(value) for value in values]
    except ValueError as error:
        form = "numbers" if name == "temperature" else "whole numbers"
        raise TokenRecyclingError(f"--sweep is {text!r}; the values must be {form}") from error
    if name == "start" and not set(read) <= set(STARTS):
        raise TokenRecyclingError(f"--sweep is {text!r}; start must be cold or hot")
    if name == "temperature" and not all(map(is_temperature, read)):
        raise TokenRecyclingError(f"--sweep is {text!r}; {TEMPERATURES}")
    if name in ("k", "nodes") and min(read) < 1:
        raise TokenRecyclingError(f"--sweep is {text!r}; {name} must be 1 or more")
    return name, list(dict.fromkeys(read))


def expand(
    specs: Sequence[str],
    sweeps: Mapping[str, Sequence[Any]],
    *,
    temperature: float = 0.0,
    cold: bool = False,
) -> list[Variant]:
    """Return the variants of ``specs`` with every combination of the swept values.

    Sweeps over k, nodes and start apply to variants that keep a matrix, over trees to those that
    fill one, temperature to all. The
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
    if sweep == "tree":
        return variant.drafter is not None and variant.drafter not in SHAPE_THEIR_OWN
    return sweep == "temperature" or variant.recycles


def _set(variant: Variant, values: dict[str, Any]) -> Variant:
    """Return the variant with the swept values set and added to its name."""
    name = variant.name
    for shape in {"nodes", "tree"} & values.keys():
        mode = variant.name.partition("+")[2]
        name = f"{variant.drafter}@{values[shape]}" + (f"+{mode}" if mode else "")
    if "k" in values:
        name += f" k={values['k']}"
    if "start" in values:
        name += f" {values['start']}"
    baseline = variant.baseline
    if "temperature" in values:
        name += f" T={values['temperature']:g}"
        baseline += f" T={values['temperature']:g}"
    return replace(variant, name=name, baseline=baseline, **values)

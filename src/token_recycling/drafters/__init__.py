"""Drafters by name: the built-in ones and those registered by other packages.

A package registers a drafter through the entry-point group ``token_recycling.drafters``; the
entry point is a callable ``(matrix, template) -> Drafter``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from token_recycling.drafters.adaptive import AdaptiveDrafter
from token_recycling.drafters.base import AnyDrafter, Drafter, Rows
from token_recycling.drafters.none import NoDrafter
from token_recycling.drafters.paper import PaperDrafter
from token_recycling.drafters.prompt_lookup import PromptLookupDrafter
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.tree import TreeTemplate

__all__ = [
    "AdaptiveDrafter",
    "AnyDrafter",
    "Drafter",
    "NoDrafter",
    "PaperDrafter",
    "PromptLookupDrafter",
    "Rows",
    "make_drafter",
    "names",
]

Factory = Callable[[AdjacencyMatrix, TreeTemplate], AnyDrafter]
GROUP = "token_recycling.drafters"


def _adaptive(matrix: AdjacencyMatrix, template: TreeTemplate) -> AnyDrafter:
    """Make an adaptive drafter; only the number of nodes is taken from ``template``."""
    return AdaptiveDrafter(matrix, len(template.paths))


BUILT_IN: dict[str, Factory] = {
    AdaptiveDrafter.name: _adaptive,
    PaperDrafter.name: PaperDrafter,
    PromptLookupDrafter.name: lambda matrix, template: PromptLookupDrafter(),
    NoDrafter.name: lambda matrix, template: NoDrafter(),
}


def names() -> list[str]:
    """Return the names of all drafters, the built-in ones first."""
    registered = (point.name for point in entry_points(group=GROUP))
    return list(dict.fromkeys([*BUILT_IN, *registered]))


def make_drafter(name: str, matrix: AdjacencyMatrix, template: TreeTemplate) -> AnyDrafter:
    """Create the drafter named ``name``.

    Raises:
        TokenRecyclingError: there is no drafter of that name, or it cannot be loaded.
    """
    if name in BUILT_IN:
        return BUILT_IN[name](matrix, template)
    for point in entry_points(group=GROUP, name=name):
        try:
            factory: Factory = point.load()
        except Exception as error:  # whatever the other package raises while it is imported
            line = f"{type(error).__name__}: {one_line(error, 200)}"
            raise TokenRecyclingError(f"cannot load the drafter {name!r}: {line}") from error
        return factory(matrix, template)
    raise TokenRecyclingError(f"unknown drafter {name!r}; choose from {', '.join(names())}")

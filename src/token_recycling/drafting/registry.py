"""Drafters by name: the built-in ones and those registered by other packages.

A package registers a drafter through the entry-point group ``token_recycling.drafters``; the
entry point is a callable ``(matrix, template) -> Drafter``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from skinny_kernels.errors import one_line
from token_recycling import defaults
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import AnyDrafter, Drafter
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.paper import PaperDrafter
from token_recycling.drafting.prompt_lookup import LOOKUP_TOKENS, PromptLookupDrafter
from token_recycling.drafting.templates import TreeTemplate
from token_recycling.errors import TokenRecyclingError

Factory = Callable[[AdjacencyMatrix, TreeTemplate], AnyDrafter]
GROUP = "token_recycling.drafters"


# Drafters that shape every draft themselves, and take no template.
SHAPE_THEIR_OWN = (AdaptiveDrafter.name, PromptLookupDrafter.name, NoDrafter.name)


def names() -> list[str]:
    """Return the names of all drafters, the built-in ones first."""
    adaptive, *others = SHAPE_THEIR_OWN
    registered = (point.name for point in entry_points(group=GROUP))
    return list(dict.fromkeys([adaptive, PaperDrafter.name, *others, *registered]))


def check_name(name: str) -> None:
    """Raise ``TokenRecyclingError`` if there is no drafter of that name."""
    built_in = (PaperDrafter.name, *SHAPE_THEIR_OWN)
    if name not in built_in and name not in names():  # the latter looks at all packages
        raise _unknown(name)


def _unknown(name: str) -> TokenRecyclingError:
    return TokenRecyclingError(f"unknown drafter {name!r}; choose from {', '.join(names())}")


def make_drafter(
    name: str,
    matrix: AdjacencyMatrix,
    template: TreeTemplate | None = None,
    nodes: int | None = None,
) -> AnyDrafter:
    """Create the drafter named ``name``.

    Args:
        name: see ``names``.
        matrix: that it learns into, if it uses one.
        template: the tree that it fills; None for those in ``SHAPE_THEIR_OWN``.
        nodes: most nodes of a draft below the root; None: ``defaults.AUTOMATIC_NODES``, or the
            drafter's own default. Drafters that fill a tree have those of the tree.

    Raises:
        TokenRecyclingError: there is no drafter of that name, or it cannot be loaded.
    """
    if name == AdaptiveDrafter.name:
        return AdaptiveDrafter(matrix, nodes or defaults.AUTOMATIC_NODES)
    if name == PromptLookupDrafter.name:
        return PromptLookupDrafter(length=nodes or LOOKUP_TOKENS)
    if name == NoDrafter.name:
        return NoDrafter()
    template = template or TreeTemplate.load(PaperDrafter.name, matrix.k)
    if name == PaperDrafter.name:
        return PaperDrafter(matrix, template)
    for point in entry_points(group=GROUP, name=name):
        try:
            factory: Factory = point.load()
            drafter = factory(matrix, template)
        except Exception as error:  # whatever the other package raises
            line = f"{type(error).__name__}: {one_line(error, 200)}"
            raise TokenRecyclingError(f"cannot load the drafter {name!r}: {line}") from error
        if not isinstance(drafter, Drafter):
            kind = type(drafter).__name__
            raise TokenRecyclingError(f"the drafter {name!r} is a {kind}; it must be a Drafter")
        return drafter
    raise _unknown(name)

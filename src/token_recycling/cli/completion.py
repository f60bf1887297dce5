"""What a shell offers after Tab; without PyTorch, which would take seconds to import."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import token_recycling
from token_recycling.defaults import DRAFTER

DRAFTERS = (DRAFTER, "paper", "prompt-lookup", "none")
DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
DECODERS = ("generate", "generate-pld", "auto", *DRAFTERS)


def _offering(choices: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def offer(incomplete: str) -> list[str]:
        return [choice for choice in choices() if choice.startswith(incomplete)]

    return offer


def _drafters() -> list[str]:
    from importlib.metadata import entry_points  # takes 10 ms, which no other command needs

    registered = (point.name for point in entry_points(group="token_recycling.drafters"))
    return list(dict.fromkeys([*DRAFTERS, *registered]))


def _trees() -> list[str]:
    folder = Path(token_recycling.__file__).parent / "drafting" / "trees"
    return [*sorted(file.stem for file in folder.glob("*.json")), "chain-8"]


def _fetched_dtypes() -> Iterable[str]:
    from token_recycling.checkpoint.fetch import FETCH_DTYPES

    return FETCH_DTYPES


drafter = _offering(_drafters)
tree = _offering(_trees)
dtype = _offering(lambda: DTYPES)
fetched_dtype = _offering(_fetched_dtypes)


def decoders(incomplete: str) -> list[str]:
    """Offer names for the last of several, separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in DECODERS if name.startswith(last)]

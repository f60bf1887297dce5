"""Which requests share what the matrix learns."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Literal

from token_recycling.drafting.base import AnyDrafter

Scope = Literal["shared", "key", "request"]
SCOPES: tuple[Scope, ...] = ("shared", "key", "request")
MOST_KEYS = 16  # keys whose matrix is kept; others start with an empty one


class MatrixScopes:
    """The drafters of a server: one for all, one per key, or one per request."""

    def __init__(self, drafter: AnyDrafter, scope: Scope) -> None:
        """Start every scope with what ``drafter`` knows now."""
        self.scope, self._shared = scope, drafter
        self._first = None if scope == "shared" else copy.deepcopy(drafter)
        self._of_key: OrderedDict[str, AnyDrafter] = OrderedDict()

    def drafter(self, key: str) -> AnyDrafter:
        """Return the drafter of a request that came with ``key``."""
        if self._first is None:
            return self._shared
        if self.scope == "request":
            return copy.deepcopy(self._first)
        if key not in self._of_key:
            self._of_key[key] = copy.deepcopy(self._first)
            if len(self._of_key) > MOST_KEYS:
                self._of_key.popitem(last=False)
        self._of_key.move_to_end(key)
        return self._of_key[key]

    def owner(self, key: str) -> str:
        """Return who may reuse the keys and values of a text that came with ``key``."""
        return "" if self.scope == "shared" else key

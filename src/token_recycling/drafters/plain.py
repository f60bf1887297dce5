"""No draft: plain decoding through the same loop."""

from __future__ import annotations

from torch import Tensor

from token_recycling.accept import bare_roots
from token_recycling.drafters.base import Drafter
from token_recycling.tree import DraftTree


class NoDrafter(Drafter):
    """Proposes the root alone, so that every step yields one token."""

    name = "none"
    fixed_shapes = True

    def propose(self, roots: Tensor) -> DraftTree:
        """Return the bare roots."""
        return bare_roots(roots)

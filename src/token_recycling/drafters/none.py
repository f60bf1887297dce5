"""No draft: plain decoding through the same loop."""

from __future__ import annotations

from torch import Tensor

from token_recycling.drafters.base import Drafter, Rows
from token_recycling.tree import DraftTree, root_only


class NoDrafter(Drafter[Rows]):
    """Proposes the root alone, so that every step yields one token."""

    name = "none"
    capturable = True

    def propose(self, rows: Rows, roots: Tensor, nodes: int | None = None) -> DraftTree:
        """Return the roots."""
        return root_only(roots)

"""Plain decoding in the same loop, without drafts."""

from __future__ import annotations

from torch import Tensor

from token_recycling.drafting.base import Drafter, DrafterState
from token_recycling.drafting.draft import DraftTree, root_only


class NoDrafter(Drafter[DrafterState]):
    """Proposes root-only drafts, so that every step emits one token."""

    name = "none"

    def propose(self, state: DrafterState, roots: Tensor, size: int | None = None) -> DraftTree:
        """Return root-only drafts."""
        return root_only(roots)

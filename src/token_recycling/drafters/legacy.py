"""Support for drafters with the deprecated interface, which store their rows themselves."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters.base import AnyDrafter, Drafter, Rows
from token_recycling.tree import DraftTree, root_only


def adapted(drafter: Any) -> AnyDrafter:
    """Return ``drafter``, wrapped and with a warning if its ``propose`` takes only roots."""
    parameters = inspect.signature(drafter.propose).parameters.values()
    if sum(one.default is one.empty for one in parameters) > 1:
        found: AnyDrafter = drafter
        return found
    warnings.warn(
        f"the drafter {drafter.name!r} has the old methods start, wants, prime, propose(roots); "
        "see Drafter for the new ones",
        DeprecationWarning,
        stacklevel=3,
    )
    return LegacyDrafter(drafter)


class LegacyDrafter(Drafter[Rows]):
    """Adapts a drafter with the deprecated interface."""

    def __init__(self, drafter: Any) -> None:
        """Wrap ``drafter``, which can serve only one batch at a time."""
        self.drafter, self.name = drafter, drafter.name
        self.matrix = getattr(drafter, "matrix", None)
        self.needs_logits = bool(getattr(drafter, "needs_logits", False))

    @property
    def acceptance(self) -> tuple[float, ...]:
        """The ``shares`` of the wrapped drafter."""
        return tuple(getattr(self.drafter, "shares", ()))

    def load(self, rows: Rows, texts: list[list[int]]) -> None:
        """Call ``start``."""
        self._call("start", texts)

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Call ``wants``."""
        mask: Tensor | None = self._call("wants", tokens)
        return mask

    def learn_prompt(self, tokens: Tensor, logits: Tensor, mask: Tensor) -> None:
        """Call ``prime``."""
        self._call("prime", tokens, logits, mask)

    def propose(self, rows: Rows, roots: Tensor, nodes: int | None = None) -> DraftTree:
        """Call ``propose``, or ``rest`` for a root-only draft."""
        if nodes == 1:
            draft: DraftTree | None = self._call("rest", roots)
            return root_only(roots) if draft is None else draft
        whole: DraftTree = self.drafter.propose(roots)
        return whole.first(nodes)

    def sources(self, rows: Rows, draft: DraftTree) -> list[str]:
        """Call ``sources``."""
        found: list[str] | None = self._call("sources", draft)
        return super().sources(rows, draft) if found is None else found

    def observe(self, rows: Rows, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Call ``observe``."""
        self._call("observe", draft, logits, accepted)

    def _call(self, name: str, *args: Any) -> Any:
        """Call a method that the drafter defines itself; None where it does not."""
        method = getattr(type(self.drafter), name, None)
        if method is None or method is getattr(Drafter, name, None):
            return None
        return method(self.drafter, *args)

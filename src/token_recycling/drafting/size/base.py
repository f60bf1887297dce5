"""The interface of draft-size policies, which choose how many nodes a step verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from token_recycling.drafting.draft import DraftTree


class DraftSize(ABC):
    """Chooses how many nodes of each draft are verified.

    Who decodes calls ``begin`` when rows join, leave or start, and once per step ``limit``,
    ``choose`` and ``record``. A graph, whose drafts have one size, asks for ``typical`` instead of
    ``limit`` and ``choose``.
    """

    pays = True  # False while drafts are not verified; the drafter then skips the prompts

    def begin(self, rows: int) -> None:  # noqa: B027
        """Go on with this number of rows."""

    @abstractmethod
    def limit(self) -> int | None:
        """Return the number of nodes that the drafter may propose next, including the root.

        Returns:
            1: a root-only draft. None: as many nodes as the drafter proposes.
        """

    @abstractmethod
    def typical(self, now: int = 0) -> int | None:
        """Return one size for the next steps (see ``limit``); ``now`` if that is nearly as good."""

    def choose(self, draft: DraftTree) -> int:
        """Return n, to verify the first n nodes of ``draft``.

        Args:
            draft: at most ``limit`` nodes per row, on the host; rows without a valid root have
                ended.
        """
        return draft.size

    def record(  # noqa: B027
        self, rows: int, drafted: int, emitted: float, seconds: float | None
    ) -> None:
        """Learn from a step.

        Args:
            rows: of the batch.
            drafted: nodes that were verified, over all rows, roots not included.
            emitted: mean tokens of the rows that had not ended.
            seconds: time of the step; None: it says nothing, because of what else was done in it.
        """

    def why_plain(self) -> str | None:
        """Return in one line why drafts are not verified at present; None if they are."""
        return None

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt from texts, without times, for ``restore``."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Continue from a ``state``."""


class FixedSize(DraftSize):
    """Verifies whole drafts, or drafts of a fixed size."""

    def __init__(self, size: int | None = None) -> None:
        """Verify up to ``size`` nodes, including the root; None: all."""
        self.size = size

    def limit(self) -> int | None:
        """Return the fixed size."""
        return self.size

    def typical(self, now: int = 0) -> int | None:
        """Return the fixed size."""
        return self.size

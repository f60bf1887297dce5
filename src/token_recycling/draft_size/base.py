"""How many nodes of a draft a step verifies: the policy beside the drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from token_recycling.metrics import Step
from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree


class DraftSize(ABC):
    """Chooses the size of every draft from what steps cost and emit.

    The decoding loop calls ``begin`` once, then ``limit``, ``choose`` and ``record`` per step.
    """

    pays = True  # False while drafts are not verified; prompts then need not teach the drafter

    def begin(self, sequences: list[Sequence]) -> None:  # noqa: B027
        """Begin with other texts."""

    @abstractmethod
    def limit(self) -> int | None:
        """Return the nodes that the next draft may have, the root included.

        Returns:
            1: no draft is grown. None: as many as the drafter has.
        """

    def choose(self, draft: DraftTree, sequences: list[Sequence]) -> int:
        """Return how many nodes of ``draft``, the first ones, are verified.

        Args:
            draft: of at most ``limit`` nodes.
            sequences: the rows that it continues.
        """
        return draft.nodes

    def record(self, step: Step, sequences: list[Sequence]) -> None:  # noqa: B027
        """Take what a step emitted and how long it took.

        Args:
            step: that verified the draft.
            sequences: the rows after it.
        """

    def for_graph(self) -> DraftSize:
        """Return the policy for steps that are captured as graphs, one graph for each size."""
        return self

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt from texts, for ``restore``; times are left out."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Continue from a ``state``."""


class FixedSize(DraftSize):
    """Always verify whole drafts, or their first ``nodes`` nodes."""

    def __init__(self, nodes: int | None = None) -> None:
        """Verify up to ``nodes`` nodes, the root included; None: all."""
        self.nodes = nodes

    def limit(self) -> int | None:
        """Return the same number at every step."""
        return self.nodes

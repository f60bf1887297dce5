"""The interface of draft-size policies, which choose how many nodes a step verifies."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from token_recycling.metrics import Step
from token_recycling.sequence import Sequence
from token_recycling.tree import DraftTree


class DraftSize(ABC):
    """Chooses how many nodes of each draft are verified.

    The decoding loop calls ``begin`` whenever it calls ``Drafter.load``, then ``limit``,
    ``choose`` and ``record`` once per step.
    """

    pays = True  # False while drafts are not verified; the drafter then skips the prompts

    def begin(self, sequences: list[Sequence]) -> None:  # noqa: B027
        """Start with new texts."""

    @abstractmethod
    def limit(self) -> int | None:
        """Return the number of nodes that the drafter may propose next, including the root.

        Returns:
            1: a root-only draft. None: as many nodes as the drafter proposes.
        """

    def choose(self, draft: DraftTree, sequences: list[Sequence]) -> int:
        """Return n, to verify the first n nodes of ``draft``.

        Args:
            draft: at most ``limit`` nodes per row.
            sequences: the rows that it continues.
        """
        return draft.nodes

    def record(self, step: Step, sequences: list[Sequence]) -> None:  # noqa: B027
        """Learn from the tokens and the time of a step.

        Args:
            step: the step that verified the draft.
            sequences: the rows after the step.
        """

    def for_graph(self) -> DraftSize:
        """Return the policy for graph steps, where every size is a graph of its own."""
        return self

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt from texts, without times, for ``restore``."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Continue from a ``state``."""


class FixedSize(DraftSize):
    """Verifies whole drafts, or drafts of a fixed number of nodes."""

    def __init__(self, nodes: int | None = None) -> None:
        """Verify up to ``nodes`` nodes, including the root; None: all."""
        self.nodes = nodes

    def limit(self) -> int | None:
        """Return the fixed number of nodes."""
        return self.nodes

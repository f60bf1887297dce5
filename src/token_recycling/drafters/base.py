"""The protocol of a drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.tree import DraftTree


class Drafter(ABC):
    """Proposes a draft tree for every row of a batch and learns from what the target answers.

    The loop calls ``start`` once, ``prime`` for every chunk of the prompts if ``wants_prompt``,
    then ``propose`` and ``observe`` once per step. A drafter that keeps an adjacency matrix holds
    it in ``matrix``.
    """

    name: str
    wants_prompt = False

    @property
    @abstractmethod
    def nodes(self) -> int:
        """Nodes of every draft, the root included."""

    def start(self, prompts: list[list[int]]) -> None:  # noqa: B027
        """Begin a batch of sequences."""

    def prime(self, tokens: Tensor, logits: Tensor, valid: Tensor) -> None:  # noqa: B027
        """Learn from a chunk of the prompts.

        Args:
            tokens: int64 [B, c].
            logits: [B, c, V], the target's answer at each of them.
            valid: bool [B, c]; False where a row's prompt has ended before.
        """

    @abstractmethod
    def propose(self, roots: Tensor) -> DraftTree:
        """Return a draft below ``roots`` (int64 [B], the last token of every row)."""

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:  # noqa: B027
        """Learn from the target's answer to every node, rejected ones too.

        Args:
            draft: what was proposed; only its valid nodes count.
            logits: [B, n, V].
            accepted: what became of it.
        """

"""The contract of a drafter, and of what it keeps of each row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.matrix import AdjacencyMatrix
from token_recycling.tree import DraftTree

Self = TypeVar("Self", bound="Rows")


@dataclass
class Rows:
    """What a drafter keeps of each row of a batch.

    A subclass is a dataclass. Its fields are tensors [B, …], other ``Rows`` or None; fields of
    any other type belong to all rows. The caller holds the rows and passes them to every call of
    the drafter, which may change them. Rows are independent of each other: engines, whose requests
    come and go, select and write them by index.
    """

    def select(self: Self, index: Tensor) -> Self:
        """Return copies of the rows at ``index`` (int64 [b])."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        for name, value in found.items():
            if isinstance(value, Rows):
                found[name] = value.select(index)
            elif isinstance(value, Tensor):
                found[name] = value[index]
        return replace(self, **found)

    def write(self: Self, index: Tensor, rows: Self | None) -> None:
        """Put ``rows`` at ``index`` (int64 [b], each at most once); None: zeros."""
        for one in fields(self):
            mine = getattr(self, one.name)
            theirs = None if rows is None else getattr(rows, one.name)
            if isinstance(mine, Rows):
                mine.write(index, theirs)
            elif isinstance(mine, Tensor):
                mine[index] = torch.zeros_like(mine[index]) if theirs is None else theirs


R = TypeVar("R", bound=Rows)


class Drafter(ABC, Generic[R]):
    """Proposes a draft tree for every row of a batch and learns from the target's logits.

    The decoding loop calls ``new_rows`` and ``load`` once, ``prompt_mask`` and ``learn_prompt``
    for every chunk of the prompts, then ``propose`` and ``observe`` once per step. The object
    itself holds only what all rows share. A drafter that keeps an adjacency matrix holds it in
    ``matrix``.
    """

    name: str
    matrix: AdjacencyMatrix | None = None
    needs_logits = False  # learns from the logits, not only from the emitted tokens
    # ``propose`` and ``observe`` are tensor functions of fixed shapes that write in place and never
    # read from the device, so that a graph can hold them. Rows with a ``capacity`` must then keep
    # their tensors; ``load`` refills them.
    capturable = False

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Acceptance probability that is expected of each node below the root, highest first.

        A drafter that has it proposes the most useful nodes first, so that the first n nodes of a
        draft are its draft of n, and a draft-size policy may cut it. Empty: drafts stay whole.
        """
        return ()

    def new_rows(self, batch: int, capacity: int | None = None) -> R:
        """Return the state of ``batch`` rows.

        Args:
            batch: B.
            capacity: tokens that a row may come to; then all shapes stay fixed. None: it grows.
        """
        return Rows()  # type: ignore[return-value]

    def load(self, rows: R, texts: list[list[int]]) -> None:
        """Begin again with other texts.

        Args:
            rows: of ``new_rows``, B of them.
            texts: the tokens of every row so far, except the next root where one is known.
        """

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Say of which tokens of a chunk of the prompts, int64 [B, c], it wants the logits.

        Computing them costs time, and so does learning from them.

        Returns:
            bool [B, c]; None: of none.
        """
        return None

    def learn_prompt(self, tokens: Tensor, logits: Tensor, mask: Tensor) -> None:
        """Learn from those columns of a chunk that hold a token of ``prompt_mask``.

        Args:
            tokens: int64 [B, w].
            logits: [B, w, V], the target's logits after each of them.
            mask: bool [B, w]; False where the token was not asked for, or the prompt has ended.
        """

    @abstractmethod
    def propose(self, rows: R, roots: Tensor, nodes: int | None = None) -> DraftTree:
        """Return drafts of at most ``nodes`` nodes, the root included.

        Args:
            rows: B rows.
            roots: int64 [B], the last token of every row; it joins the row's text.
            nodes: 1: the root alone. None: as many as the drafter has.
        """

    def sources(self, rows: R, draft: DraftTree) -> list[str]:
        """Say of each node of the first row where it came from, before it is observed."""
        return [self.name] * draft.nodes

    def observe(self, rows: R, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Learn from the target's logits at every node, rejected ones too.

        Args:
            rows: B rows; what was emitted joins their texts, except for the last token, which
                comes back as the next root.
            draft: what was verified; only its valid nodes count.
            logits: [B, n, V].
            accepted: what was accepted and emitted.
        """


AnyDrafter = Drafter[Any]

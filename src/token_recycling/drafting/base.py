"""The interface of drafters and of their state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.candidates import Candidates
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.matrix import AdjacencyMatrix

Self = TypeVar("Self", bound="DrafterState")
PROMPTS = ("whole", "part", "none")  # how much of a prompt teaches (see ``Drafter.prompts``)


@dataclass
class DrafterState:
    """A drafter's state of each row of a batch.

    A subclass is a dataclass. Its fields are tensors [B, …], other states or None; fields of other
    types apply to all rows. The caller owns the state and passes it to every call of the drafter,
    which may modify it. Rows are independent of each other: the engines select and write them by
    index as requests arrive and finish.
    """

    def select(self: Self, index: Tensor) -> Self:
        """Return copies of the rows at ``index`` (int64 [b])."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, DrafterState):
                values[name] = value.select(index)
            elif isinstance(value, Tensor):
                values[name] = value[index]
        return replace(self, **values)

    def write(self: Self, index: Tensor, rows: Self | None) -> None:
        """Write ``rows`` to ``index`` (int64 [b], no duplicates); None: write empty rows.

        Raises:
            ValueError: a field that ``rows`` has is None here.
        """
        for field in fields(self):
            current = getattr(self, field.name)
            new = None if rows is None else getattr(rows, field.name)
            if isinstance(current, DrafterState):
                current.write(index, new)
            elif current is None and new is not None:
                raise ValueError(f"these rows have no {field.name} to write to")
            elif isinstance(current, Tensor):
                current[index] = torch.zeros_like(current[index]) if new is None else new

    def make_room(self) -> None:
        """Drop the oldest tokens of rows that the next step could overflow, in place."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, DrafterState):
                value.make_room()


R = TypeVar("R", bound=DrafterState)


class Drafter(ABC, Generic[R]):
    """Proposes a draft tree for every row of a batch and learns from the target's candidates.

    The decoding loop calls ``new_state`` once, ``load`` before the prompts are read and again
    after graph steps, ``prompt_mask`` and ``learn_prompt`` for every chunk of the prompts, then
    ``propose`` and ``observe`` once per step. The object itself stores only what is common to all
    rows. A drafter that uses an adjacency matrix has it in ``matrix``. Drafts of
    classes outside this package are checked (see ``checked``).
    """

    name: str
    matrix: AdjacencyMatrix | None = None
    # "whole": ``learn_prompt`` gets all that ``prompt_mask`` selects, "part": only the last of
    # these in a chunk, as many as ``model.base.PROMPT_COST`` allows, "none": nothing.
    prompts: str = "part"

    @property
    def k(self) -> int:
        """Candidates per node to learn from: those that a row of the matrix keeps, or none."""
        return 0 if self.matrix is None else self.matrix.k

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Expected acceptance probability of each node below the root, in descending order.

        A drafter with acceptance probabilities proposes the most useful nodes first: the first n
        nodes of a draft are its best draft of n nodes, and a draft-size policy may truncate it.
        Empty: drafts are never truncated.
        """
        return ()

    @property
    def full_size(self) -> int:
        """Nodes of a whole draft, root included; here, of a draft below a text of one token."""
        state = self.new_state(1, 256)
        return self.propose(state, torch.zeros(1, dtype=torch.long, device="cpu")).size

    def new_state(self, batch: int, capacity: int | None = None) -> R:
        """Return new state for ``batch`` rows.

        Args:
            batch: B.
            capacity: most tokens of a row; all shapes are then fixed. None: the state may grow.
        """
        return DrafterState()  # type: ignore[return-value]

    def load(self, state: R, texts: list[list[int]]) -> None:
        """Replace the text of every row.

        Args:
            state: of B rows, from ``new_state``.
            texts: the tokens of every row so far, without the next root if that is known.
        """

    def prompt_mask(self, tokens: Tensor) -> Tensor | None:
        """Select the prompt tokens whose candidates ``learn_prompt`` is to get.

        Computing them and learning from them both cost time.

        Args:
            tokens: int64 [B, c], a chunk of the prompts.

        Returns:
            bool [B, c]; None: no token.
        """
        return None

    def learn_prompt(self, tokens: Tensor, candidates: Candidates, mask: Tensor) -> None:
        """Learn from the columns of a chunk in which ``prompt_mask`` selected a token.

        Args:
            tokens: int64 [B, w].
            candidates: [B, w, k], what the target ranks best after each token.
            mask: bool [B, w]; False where the token was not selected or is padding.
        """

    @abstractmethod
    def propose(self, state: R, roots: Tensor, size: int | None = None) -> DraftTree:
        """Return drafts of at most ``size`` nodes, including the root.

        Args:
            state: of B rows.
            roots: int64 [B], the last token of every row; it is appended to the row's text.
            size: 1: root-only drafts. None: as many nodes as the drafter proposes.
        """

    def sources(self, state: R, draft: DraftTree) -> list[str]:
        """Return the source of each node of the first row; called before ``observe``."""
        return [self.name] * draft.size

    def observe(
        self, state: R, draft: DraftTree, candidates: Candidates, accepted: Accepted
    ) -> None:
        """Learn from the target's candidates at every node, including rejected ones.

        Args:
            state: of B rows; the emitted tokens are appended to their texts, except for the last
                one, which is the next root.
            draft: the verified draft; only its valid nodes count.
            candidates: [B, n, k], what the target ranks best after each node.
            accepted: what was accepted and emitted.
        """


AnyDrafter = Drafter[Any]

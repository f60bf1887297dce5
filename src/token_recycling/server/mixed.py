"""One batch of rows that differ in their drafter or in how their tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from token_recycling.decoding.accept import Acceptor, Appended
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import AnyDrafter, Drafter, DrafterState
from token_recycling.drafting.candidates import Candidates
from token_recycling.drafting.draft import DraftTree
from token_recycling.util.tokens import NO_TOKEN


class RowAcceptor:
    """Chooses the tokens of each row with an acceptor of its own."""

    def __init__(self, accepts: list[Acceptor]) -> None:
        """Accept row b with ``accepts[b]``, an acceptor for a single row."""
        self._accepts = accepts

    def __call__(
        self, draft: DraftTree, logits: Tensor, sequences: list[Sequence], best: Any = None
    ) -> tuple[Accepted, Appended]:
        """Accept row by row."""
        results = [
            accept(draft.select([row]), logits[row : row + 1], [sequence])
            for row, (accept, sequence) in enumerate(zip(self._accepts, sequences))
        ]
        accepted, appended = zip(*results)
        tokens, reasons, drafted = ([row for (row,) in column] for column in zip(*appended))
        return _joined(list(accepted)), Appended(tokens, reasons, drafted)


def _joined(parts: list[Accepted]) -> Accepted:
    """Return what the rows of several batches accepted, one after another."""
    longest = max(part.path.shape[1] for part in parts)

    def column(tensors: list[Tensor], fill: int) -> Tensor:
        return torch.cat(
            [pad(tensor, (0, longest - tensor.shape[1]), value=fill) for tensor in tensors]
        )

    return Accepted(
        column([part.path for part in parts], 0),
        column([part.emitted for part in parts], NO_TOKEN),
        torch.cat([part.counts for part in parts]),
    )


@dataclass
class _GroupedState(DrafterState):
    """The rows of each drafter."""

    groups: list[DrafterState]


class GroupedDrafter(Drafter[_GroupedState]):
    """Drafts every row with a drafter of its own, for texts that must not teach each other.

    All must be of the same kind. What they learn from is divided among them; ``prompt_mask`` and
    ``learn_prompt`` are not, because prompts are read one by one.
    """

    def __init__(self, drafters: list[AnyDrafter]) -> None:
        """Draft row b with ``drafters[b]``; several rows may have the same."""
        self._members = list(dict.fromkeys(drafters))
        self._rows = [
            [row for row, drafter in enumerate(drafters) if drafter is member]
            for member in self._members
        ]
        first = drafters[0]
        self.name, self._k = first.name, first.k

    @property
    def k(self) -> int:
        """That of the first drafter."""
        return self._k

    def new_state(self, batch: int, capacity: int | None = None) -> _GroupedState:
        """Return new rows of each drafter."""
        return _GroupedState(
            [
                member.new_state(len(rows), capacity)
                for member, rows in zip(self._members, self._rows)
            ]
        )

    def load(self, state: _GroupedState, texts: list[list[int]]) -> None:
        """Load the texts of each group."""
        for member, group, index in zip(self._members, state.groups, self._rows):
            member.load(group, [texts[row] for row in index])

    def propose(self, state: _GroupedState, roots: Tensor, size: int | None = None) -> DraftTree:
        """Return the drafts of all groups."""
        drafts = [
            member.propose(group, roots[index], size).to("cpu")
            for member, group, index in zip(self._members, state.groups, self._rows)
        ]
        largest = max(draft.size for draft in drafts)
        parts = [draft.padded(largest) for draft in drafts]
        order = torch.tensor([row for some in self._rows for row in some], device="cpu").argsort()

        def column(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])[order]

        scored = all(part.scores is not None for part in parts)
        return DraftTree(
            column("tokens"),
            column("parents"),
            column("depths"),
            column("ancestors"),
            column("valid"),
            max(part.max_depth for part in parts),
            column("scores") if scored else None,
        )

    def observe(
        self, state: _GroupedState, draft: DraftTree, candidates: Candidates, accepted: Accepted
    ) -> None:
        """Let each drafter learn from its own rows."""
        for member, group, index in zip(self._members, state.groups, self._rows):
            member.observe(group, draft.select(index), candidates.at(index), accepted.select(index))

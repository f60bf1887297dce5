"""Rows of one batch that are drafted by different drafters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import AnyDrafter, Drafter, Rows
from token_recycling.drafting.candidates import Candidates
from token_recycling.drafting.draft import DraftTree, joined


@dataclass
class GroupedRows(Rows):
    """The rows of each drafter."""

    groups: list[Rows]


class GroupedDrafter(Drafter[GroupedRows]):
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

    def new_rows(self, batch: int, capacity: int | None = None) -> GroupedRows:
        """Return new rows of each drafter."""
        return GroupedRows(
            [
                member.new_rows(len(rows), capacity)
                for member, rows in zip(self._members, self._rows)
            ]
        )

    def load(self, rows: GroupedRows, texts: list[list[int]]) -> None:
        """Load the texts of each group."""
        for member, group, index in zip(self._members, rows.groups, self._rows):
            member.load(group, [texts[row] for row in index])

    def propose(self, rows: GroupedRows, roots: Tensor, size: int | None = None) -> DraftTree:
        """Return the drafts of all groups."""
        drafts = [
            member.propose(group, roots[index], size).to("cpu")
            for member, group, index in zip(self._members, rows.groups, self._rows)
        ]
        return joined(drafts, self._rows)

    def observe(
        self, rows: GroupedRows, draft: DraftTree, candidates: Candidates, accepted: Accepted
    ) -> None:
        """Let each drafter learn from its own rows."""
        for member, group, index in zip(self._members, rows.groups, self._rows):
            member.observe(group, draft.select(index), candidates.at(index), accepted.select(index))

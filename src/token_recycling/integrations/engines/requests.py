"""Drafting for engines, whose batches change at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from token_recycling.accept import Accepted
from token_recycling.drafters import AnyDrafter, Rows
from token_recycling.integrations.engines.options import CONTEXT
from token_recycling.tree import DraftTree, chains


@dataclass
class _Drafts(Rows):
    """The last draft of each request, padded to n nodes; scores are left out."""

    tokens: Tensor  # int64 [B, n]
    parents: Tensor  # int64 [B, n]
    depths: Tensor  # int64 [B, n]
    ancestors: Tensor  # bool [B, n, n]
    valid: Tensor  # bool [B, n]

    @classmethod
    def empty(cls, batch: int, nodes: int, device: torch.device) -> _Drafts:
        zeros = torch.zeros((batch, nodes), dtype=torch.long, device=device)
        ancestors = torch.zeros((batch, nodes, nodes), dtype=torch.bool, device=device)
        return cls(zeros, zeros.clone(), zeros.clone(), ancestors, zeros.bool())

    @classmethod
    def of(cls, draft: DraftTree, nodes: int) -> _Drafts:
        more = nodes - draft.nodes
        return cls(
            pad(draft.tokens, (0, more)),
            pad(draft.parents, (0, more)),
            pad(draft.depths, (0, more)),
            pad(draft.ancestors, (0, more, 0, more)),
            pad(draft.valid, (0, more)),
        )


class RequestDrafter:
    """One drafter for many requests, any of them in a step.

    Every request has a slot, 0 to ``requests`` - 1, which the engine gives it. Its rows lie there
    from step to step, on the drafter's device; what is learnt is shared by all.
    """

    def __init__(
        self,
        drafter: AnyDrafter,
        requests: int,
        nodes: int,
        device: torch.device | str,
        *,
        context: int = CONTEXT,
        chain: bool = False,
    ) -> None:
        """Draft for up to ``requests`` requests.

        Args:
            drafter: one that is ``capturable``.
            requests: slots.
            nodes: of a draft at most, the root included.
            device: of the drafter.
            context: tokens of a request that it looks at.
            chain: of each draft propose only the branch that is likeliest.
        """
        self.drafter, self.nodes, self.context, self.chain = drafter, nodes, context, chain
        self.device = torch.device(device)
        self._rows = drafter.new_rows(requests, context)
        self._drafts = _Drafts.empty(requests, nodes, self.device)
        root = torch.zeros(1, dtype=torch.long, device=self.device)
        whole = drafter.propose(drafter.new_rows(1, context), root)
        self.max_depth = min(whole.max_depth, nodes - 1)

    def begin(self, slots: Tensor, texts: list[list[int]]) -> None:
        """Give ``slots`` to requests: of each all tokens but the last, which is the next root."""
        rows = self.drafter.new_rows(len(texts), self.context)
        self.drafter.load(rows, [text[-self.context // 2 :] for text in texts])
        self._rows.write(slots, rows)

    def propose(self, slots: Tensor, roots: Tensor, nodes: int) -> DraftTree:
        """Draft below ``roots`` int64 [B], the last tokens of the requests in ``slots`` int64 [B].

        Args:
            slots: each at most once.
            roots: not proposed for before.
            nodes: of each draft at most, the root included; 1: a step of plain decoding.
        """
        rows = self._rows.select(slots)
        nodes = min(nodes, self.nodes)
        if self.chain and nodes > 1:
            draft = _likeliest(self.drafter.propose(rows, roots)).first(nodes)
        else:
            draft = self.drafter.propose(rows, roots, nodes)
        self._rows.write(slots, rows)
        self.replace_drafts(slots, draft)
        return draft

    def replace_drafts(self, slots: Tensor, draft: DraftTree) -> None:
        """Take ``draft`` for what was proposed in ``slots``."""
        self._drafts.write(slots, _Drafts.of(draft, self.nodes))

    def drafts(self, slots: Tensor) -> DraftTree:
        """Return what was proposed last in ``slots``, padded to the nodes of the largest draft."""
        return DraftTree(**vars(self._drafts.select(slots)), max_depth=self.max_depth)

    def observe(self, slots: Tensor, logits: Tensor, nodes: Tensor, emitted: Tensor) -> None:
        """Learn from a step.

        Args:
            slots: int64 [B].
            logits: [B, n, V], the target's logits at the first n nodes of what was proposed.
            nodes: int64 [B], how many of them were verified, the root included.
            emitted: int64 [B, t], what each request got; ``NO_TOKEN`` behind the last.
        """
        rows = self._rows.select(slots)
        draft = self.drafts(slots).first(logits.shape[1]).up_to(nodes)
        counts = (emitted >= 0).sum(dim=1)
        accepted = Accepted(torch.zeros_like(emitted), emitted, counts)
        self.drafter.observe(rows, draft, logits, accepted)
        self._rows.write(slots, rows)


def same_on_all_ranks(group: Any, draft: DraftTree) -> DraftTree:
    """Return the first rank's draft on every tensor-parallel rank, so that all verify one tree.

    Args:
        group: of the engine, with ``world_size`` and ``broadcast``; None: there is one rank.
        draft: of this rank.
    """
    if group is None or group.world_size == 1:
        return draft
    message: Tensor = group.broadcast(as_message(draft), src=0)
    return from_message(message, draft.max_depth)


def as_message(draft: DraftTree) -> Tensor:
    """Put a draft into one tensor, int64 [B, 4 + n, n]."""
    parts = [draft.tokens, draft.parents, draft.depths, draft.valid.long()]
    return torch.cat([torch.stack(parts, dim=1), draft.ancestors.long()], dim=1).contiguous()


def from_message(message: Tensor, max_depth: int) -> DraftTree:
    """Return the draft of ``as_message``."""
    tokens, parents, depths, valid = message[:, :4].unbind(dim=1)
    return DraftTree(tokens, parents, depths, message[:, 4:].bool(), valid.bool(), max_depth)


def _likeliest(draft: DraftTree) -> DraftTree:
    """Return the branch that is likeliest to the drafter, as a draft of its own."""
    path, counts = draft.best_branch()
    return chains(draft.tokens.gather(1, path)).up_to(counts)

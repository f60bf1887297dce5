"""Drafting for serving engines, whose batches change at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters import AnyDrafter, Rows
from token_recycling.integrations.engines.options import CONTEXT
from token_recycling.tree import DraftTree, chains


@dataclass
class _Drafts(Rows):
    """The last draft of each request, padded to n nodes, without scores."""

    tokens: Tensor  # int64 [B, n]
    parents: Tensor  # int64 [B, n]
    depths: Tensor  # int64 [B, n]
    ancestors: Tensor  # bool [B, n, n]
    valid: Tensor  # bool [B, n]

    @classmethod
    def empty(cls, batch: int, nodes: int) -> _Drafts:
        zeros = torch.zeros((batch, nodes), dtype=torch.long, device="cpu")
        ancestors = torch.zeros((batch, nodes, nodes), dtype=torch.bool, device="cpu")
        return cls(zeros, zeros.clone(), zeros.clone(), ancestors, zeros.bool())

    @classmethod
    def of(cls, draft: DraftTree, nodes: int) -> _Drafts:
        draft = draft.padded(nodes)
        return cls(draft.tokens, draft.parents, draft.depths, draft.ancestors, draft.valid)


class RequestDrafter:
    """One drafter for many requests, any subset of which takes part in a step.

    Every request has a request slot, 0 to ``requests`` - 1, assigned by the engine. The drafter's
    state of a request stays in its slot across steps, on the host. All requests use the same
    matrix.
    """

    def __init__(
        self,
        drafter: AnyDrafter,
        requests: int,
        nodes: int,
        *,
        context: int = CONTEXT,
        chain: bool = False,
    ) -> None:
        """Allocate slots for ``requests`` requests.

        Args:
            drafter: shared by all requests.
            requests: number of slots.
            nodes: maximum nodes of a draft, root included.
            context: tokens of a request that the drafter can use.
            chain: propose only the most likely branch of each draft.
        """
        self.drafter, self.nodes, self.context, self.chain = drafter, nodes, context, chain
        self._rows = drafter.new_rows(requests, context)
        self._drafts = _Drafts.empty(requests, nodes)
        root = torch.zeros(1, dtype=torch.long, device="cpu")
        whole = drafter.propose(drafter.new_rows(1, context), root)
        self.max_depth = min(whole.max_depth, nodes - 1)

    def begin(self, slots: Tensor, texts: list[list[int]]) -> None:
        """Start requests in ``slots``; ``texts`` are their tokens without the next root."""
        rows = self.drafter.new_rows(len(texts), self.context)
        self.drafter.load(rows, [text[-self.context // 2 :] for text in texts])
        self._rows.write(slots, rows)

    def propose(self, slots: Tensor, roots: Tensor, nodes: int) -> DraftTree:
        """Draft below ``roots`` int64 [B], the last tokens of the requests in ``slots`` int64 [B].

        Args:
            slots: without duplicates.
            roots: each passed to ``propose`` only once.
            nodes: maximum nodes of each draft, root included; 1: a step of plain decoding.
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
        """Replace the drafts last proposed in ``slots`` by ``draft``."""
        self._drafts.write(slots, _Drafts.of(draft, self.nodes))

    def drafts(self, slots: Tensor) -> DraftTree:
        """Return the drafts last proposed in ``slots``, padded to the maximum number of nodes."""
        return DraftTree(**vars(self._drafts.select(slots)), max_depth=self.max_depth)

    def observe(self, slots: Tensor, logits: Tensor, nodes: Tensor, emitted: Tensor) -> None:
        """Learn from a step.

        Args:
            slots: int64 [B]; this and the following are on the host, except for the logits.
            logits: [B, n, V], the target's logits at the first n nodes of the last drafts.
            nodes: int64 [B], how many of these were verified, root included.
            emitted: int64 [B, t], new tokens of each request, padded with ``NO_TOKEN``.
        """
        rows = self._rows.select(slots)
        draft = self.drafts(slots).first(logits.shape[1]).up_to(nodes)
        counts = (emitted >= 0).sum(dim=1)
        accepted = Accepted(torch.zeros_like(emitted), emitted, counts)
        self.drafter.observe(rows, draft, logits, accepted)
        self._rows.write(slots, rows)


def same_on_all_ranks(group: Any, draft: DraftTree) -> DraftTree:
    """Return rank 0's draft on all tensor-parallel ranks, so that all verify the same tree.

    Args:
        group: the engine's group, with ``world_size``, ``device`` and ``broadcast``; None: a
            single rank.
        draft: this rank's draft, on the host.
    """
    if group is None or group.world_size == 1:
        return draft
    message: Tensor = group.broadcast(draft.pack().to(group.device), src=0)
    return DraftTree.unpack(message.cpu(), draft.max_depth)


def _likeliest(draft: DraftTree) -> DraftTree:
    """Return the branch that the drafter considers most likely, as a draft."""
    path, counts = draft.best_branch()
    return chains(draft.tokens.gather(1, path)).up_to(counts)

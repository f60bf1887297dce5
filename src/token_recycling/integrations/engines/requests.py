"""Drafting for serving engines, whose batches change at every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters import AnyDrafter, Rows
from token_recycling.drafters.kernels import host
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


@dataclass
class _Live:
    """The requests of the last step, outside their slots: most steps have the same ones."""

    slots: list[int]
    rows: Any  # the drafter's, in the order of ``slots``
    draft: DraftTree | None = None  # last proposed


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
        self._live: _Live | None = None
        root = torch.zeros(1, dtype=torch.long, device="cpu")
        whole = drafter.propose(drafter.new_rows(1, context), root)
        self.max_depth = min(whole.max_depth, nodes - 1)

    def _take(self, slots: Tensor) -> _Live:
        """Return the requests in ``slots``, taken out of their slots if they were not yet."""
        wanted = slots.tolist()
        if self._live is None or self._live.slots != wanted:
            self._store()
            self._live = _Live(wanted, self._rows.select(slots))
        self._live.rows.make_room()
        return self._live

    def _store(self) -> None:
        """Put the requests of the last step back into their slots."""
        if self._live is None:
            return
        slots = torch.tensor(self._live.slots, device="cpu")
        self._rows.write(slots, self._live.rows)
        if self._live.draft is not None:
            self._drafts.write(slots, _Drafts.of(self._live.draft, self.nodes))
        self._live = None

    def begin(self, slots: Tensor, texts: list[list[int]]) -> None:
        """Start requests in ``slots``; ``texts`` are their tokens without the next root."""
        self._store()
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
        live = self._take(slots)
        nodes = min(nodes, self.nodes)
        if self.chain and nodes > 1:
            live.draft = _likeliest(self.drafter.propose(live.rows, roots)).first(nodes)
        else:
            live.draft = self.drafter.propose(live.rows, roots, nodes)
        return live.draft

    def replace_drafts(self, slots: Tensor, draft: DraftTree) -> None:
        """Replace the drafts last proposed in ``slots`` by ``draft``."""
        self._take(slots).draft = draft

    def drafts(self, slots: Tensor) -> DraftTree:
        """Return the drafts last proposed in ``slots``, padded to the maximum number of nodes."""
        live = self._live
        if live is not None and live.draft is not None:
            if live.slots == slots.tolist():
                return replace(live.draft.padded(self.nodes), max_depth=self.max_depth)
            of = torch.tensor(live.slots, device="cpu")
            self._drafts.write(of, _Drafts.of(live.draft, self.nodes))
        return DraftTree(**vars(self._drafts.select(slots)), max_depth=self.max_depth)

    def observe(self, slots: Tensor, logits: Tensor, nodes: Tensor, emitted: Tensor) -> None:
        """Learn from a step.

        Args:
            slots: int64 [B]; this and the following are on the host, except for the logits.
            logits: [B, n, V], the target's logits at the first n nodes of the last drafts.
            nodes: int64 [B], how many of these were verified, root included.
            emitted: int64 [B, t], new tokens of each request, padded with ``NO_TOKEN``.
        """
        draft = self.drafts(slots).first(logits.shape[1]).up_to(nodes)
        counts = (emitted >= 0).sum(dim=1)
        accepted = Accepted(torch.zeros_like(emitted), emitted, counts)
        self.drafter.observe(self._take(slots).rows, draft, logits, accepted)


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
    parents, valid = draft.parents.contiguous(), draft.valid.contiguous()
    path, counts = torch.zeros_like(parents), parents.new_empty(len(parents))
    host.likeliest(parents.numpy(), valid.numpy(), path.numpy(), counts.numpy())
    path = path[:, : draft.max_depth + 1]
    found = chains(draft.tokens.gather(1, path)).up_to(counts)
    if draft.scores is None:
        return found
    return replace(found, scores=draft.scores.gather(1, path))

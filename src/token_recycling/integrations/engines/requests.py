"""Drafting for serving engines, whose batches change at every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skinny_kernels.compiled import as_array
from token_recycling.decoding.walks import path_along
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import AnyDrafter, DrafterState
from token_recycling.drafting.draft import DraftTree, chains
from token_recycling.drafting.kernels.host.ranking import likeliest
from token_recycling.integrations.engines.options import CONTEXT
from token_recycling.integrations.engines.step_logits import StepLogits


@dataclass
class _Drafts(DrafterState):
    """The last draft of each request, padded to n nodes, without scores."""

    tokens: Tensor  # int64 [B, n]
    parents: Tensor  # int64 [B, n]
    depths: Tensor  # int64 [B, n]
    ancestors: Tensor  # bool [B, n, n]
    valid: Tensor  # bool [B, n]

    @classmethod
    def empty(cls, batch: int, size: int) -> _Drafts:
        zeros = torch.zeros((batch, size), dtype=torch.long, device="cpu")
        ancestors = torch.zeros((batch, size, size), dtype=torch.bool, device="cpu")
        return cls(zeros, zeros.clone(), zeros.clone(), ancestors, zeros.bool())

    @classmethod
    def of(cls, draft: DraftTree, size: int) -> _Drafts:
        draft = draft.padded(size)
        return cls(draft.tokens, draft.parents, draft.depths, draft.ancestors, draft.valid)


@dataclass
class _CurrentBatch:
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
        size: int,
        *,
        context: int = CONTEXT,
        chain: bool = False,
    ) -> None:
        """Allocate slots for ``requests`` requests.

        Args:
            drafter: shared by all requests.
            requests: number of slots.
            size: maximum nodes of a draft, root included.
            context: tokens of a request that the drafter can use.
            chain: propose only the most likely branch of each draft.
        """
        self.drafter, self.size, self.context, self.chain = drafter, size, context, chain
        self._rows = drafter.new_state(requests, context)
        self._drafts = _Drafts.empty(requests, size)
        self._live: _CurrentBatch | None = None
        self.max_depth = size - 1
        self._branch = chains(torch.zeros((1, size), dtype=torch.long, device="cpu"))
        # What every step calls is compiled before the first request.
        path_along(self._branch, self._branch.tokens)
        if chain:
            root = torch.zeros(1, dtype=torch.long, device="cpu")
            self._likeliest(drafter.propose(drafter.new_state(1, context), root), size)

    def _take(self, slots: Tensor) -> _CurrentBatch:
        """Return the requests in ``slots``, taken out of their slots if they were not yet."""
        indices = slots.tolist()
        if self._live is None or self._live.slots != indices:
            self._store()
            self._live = _CurrentBatch(indices, self._rows.select(slots))
        self._live.rows.make_room()
        return self._live

    def _store(self) -> None:
        """Put the requests of the last step back into their slots."""
        if self._live is None:
            return
        slots = torch.tensor(self._live.slots, device="cpu")
        self._rows.write(slots, self._live.rows)
        if self._live.draft is not None:
            self._drafts.write(slots, _Drafts.of(self._live.draft, self.size))
        self._live = None

    def begin(self, slots: Tensor, texts: list[list[int]]) -> None:
        """Start requests in ``slots``; ``texts`` are their tokens without the next root."""
        self._store()
        rows = self.drafter.new_state(len(texts), self.context)
        self.drafter.load(rows, [text[-self.context // 2 :] for text in texts])
        self._rows.write(slots, rows)

    def propose(self, slots: Tensor, roots: Tensor, size: int) -> DraftTree:
        """Draft below ``roots`` int64 [B], the last tokens of the requests in ``slots`` int64 [B].

        Args:
            slots: without duplicates.
            roots: each passed to ``propose`` only once.
            size: maximum nodes of each draft, root included; 1: a step of plain decoding.
        """
        live = self._take(slots)
        size = min(size, self.size)
        if self.chain and size > 1:
            live.draft = self._likeliest(self.drafter.propose(live.rows, roots), size)
        else:
            live.draft = self.drafter.propose(live.rows, roots, size)
        return live.draft

    def replace_drafts(self, slots: Tensor, draft: DraftTree) -> None:
        """Replace the drafts last proposed in ``slots`` by ``draft``."""
        self._take(slots).draft = draft

    def drafts(self, slots: Tensor) -> DraftTree:
        """Return the drafts last proposed in ``slots``, padded to the maximum number of nodes."""
        live = self._live
        if live is not None and live.draft is not None:
            if live.slots == slots.tolist():
                return replace(live.draft.padded(self.size), max_depth=self.max_depth)
            of = torch.tensor(live.slots, device="cpu")
            self._drafts.write(of, _Drafts.of(live.draft, self.size))
        return DraftTree(**vars(self._drafts.select(slots)), max_depth=self.max_depth)

    def observe(
        self,
        slots: Tensor,
        logits: StepLogits,
        rows: list[int],
        sizes: list[int],
        emitted: Tensor,
    ) -> None:
        """Learn from a step.

        Args:
            slots: int64 [B], on the host.
            logits: the target's, in the step.
            rows: of the requests in ``logits``.
            sizes: how many nodes of the last draft of each request were verified, root included.
            emitted: int64 [B, t], on the host, new tokens of each request, padded with
                ``NO_TOKEN``.
        """
        live = self._take(slots)
        draft = self._verified(live, slots, sizes)
        candidates = logits.best_padded(rows, sizes, *self._ranked(logits))
        accepted = Accepted(path_along(draft, emitted), emitted, (emitted >= 0).sum(dim=1))
        self.drafter.observe(live.rows, draft, candidates, accepted)

    def choices(self, logits: StepLogits) -> Any:
        """Return the target's best token after every node, an array int64 [sum of counts]."""
        return logits.best(*self._ranked(logits)).ids[:, 0].copy()

    def _ranked(self, logits: StepLogits) -> tuple[int, int]:
        """Return how many candidates are ranked after every node, and among how many tokens.

        One at least, for ``choices``: all calls of a step share them.
        """
        matrix = self.drafter.matrix
        vocabulary = logits.logits.shape[-1] if matrix is None else matrix.vocab_size
        return max(self.drafter.k, 1), vocabulary

    def _verified(self, live: _CurrentBatch, slots: Tensor, sizes: list[int]) -> DraftTree:
        """Return the part of the last drafts that was verified."""
        largest = max(sizes)
        draft = live.draft
        if draft is None or draft.size < largest:
            draft = self.drafts(slots)
        draft = draft.first(largest)
        return draft if min(sizes) == largest else draft.up_to(torch.tensor(sizes, device="cpu"))

    def _likeliest(self, draft: DraftTree, size: int) -> DraftTree:
        """Return the branch that the drafter considers most likely, as a draft of ``size``."""
        batch, size = len(draft.tokens), min(size, self.max_depth + 1)
        tokens, scores = np.empty((batch, size), np.int64), np.empty((batch, size), np.float32)
        worth = (
            np.ones(draft.tokens.shape, np.float32)
            if draft.scores is None
            else as_array(draft.scores)
        )
        likeliest(
            as_array(draft.parents),
            as_array(draft.valid),
            as_array(draft.tokens),
            worth,
            tokens,
            scores,
        )
        branch = self._branch.first(size)
        valid = tokens >= 0
        tokens[~valid] = 0
        return DraftTree(
            torch.from_numpy(tokens),
            branch.parents.expand(batch, size),
            branch.depths.expand(batch, size),
            branch.ancestors.expand(batch, size, size),
            torch.from_numpy(valid),
            branch.max_depth,
            None if draft.scores is None else torch.from_numpy(scores),
        )


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

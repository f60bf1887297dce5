"""Drafting on a GPU for captured steps, by kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.adaptive import AdaptiveDrafter, RootCandidates
from token_recycling.drafting.device import DeviceDrafter, DeviceMatrix
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.device.top_k import device_top_k, is_faster
from token_recycling.graph.drafting import LAG, Drafting
from token_recycling.util.tokens import NO_TOKEN


class DeviceDrafting(Drafting):
    """Drafts like an ``AdaptiveDrafter``, with tensors at fixed addresses on the device.

    The matrix is copied there when an answer begins, and back when it ends; steps share it.

    Attributes:
        states: one for each row.
    """

    lag = LAG
    drafter: AdaptiveDrafter

    def __init__(
        self,
        drafter: AdaptiveDrafter,
        batch: int,
        capacity: int,
        size: int | None,
        matrix: DeviceMatrix,
    ) -> None:
        """Make rows (see ``HostDrafting``) for a matrix that is on the device."""
        self.drafter, self._matrix = drafter, matrix
        self.size = min(size or drafter.nodes + 1, drafter.nodes + 1)
        self.max_depth = min(drafter.max_depth, self.size - 1)
        device = matrix.tables.evidence.device
        context = torch.full((batch, capacity), NO_TOKEN, device=device)
        self.states = DeviceDrafter(drafter, matrix, context, self.size)
        self._rows = torch.arange(batch, device=device)
        self._starts = self._rows * self.size  # of each row's nodes
        self._by_blocks: bool | None = None  # whether top-k is; None: not tried

    def begin(self, texts: list[list[int]], roots: Tensor) -> None:
        """Copy the matrix to the device, and the texts, without the next roots."""
        state = self.states.state
        rows = self.drafter.new_state(len(texts), state.context.shape[1])
        self.drafter.load(rows, texts)
        state.context.copy_(rows.context.tokens)
        state.lengths.copy_(rows.context.lengths)
        self.set_root_rows(rows.root_rows)
        self._matrix.load()

    def set_root_rows(self, rows: RootCandidates) -> None:
        """Copy root rows to the device."""
        roots = self.states.state.roots
        roots.candidates.copy_(rows.candidates)
        roots.probabilities.copy_(rows.probabilities.view(torch.int16))
        roots.rejected.copy_(rows.rejected)

    def end(self) -> None:
        """Copy the matrix back."""
        self._matrix.store()

    def propose(self, roots: Tensor) -> DraftTree:
        """Return drafts of ``size`` nodes below ``roots`` int64 [B]."""
        self.states.propose(self._rows, roots)
        draft = self.states.draft
        return DraftTree(*draft[:5], self.max_depth, draft.scores)

    def _top_k(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the k best logits and their tokens, by blocks if that is faster here."""
        k = self.drafter.matrix.k
        if self._by_blocks is None and not (
            logits.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            self._by_blocks = is_faster(logits, k)
        values, ids = device_top_k(logits, k) if self._by_blocks else logits.topk(k, dim=-1)
        return values, ids

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> Tensor | None:
        """Learn from a step (see ``Drafter.observe``)."""
        best = self._top_k(logits[..., : self._matrix.sizes[0]])
        self.learn_from(draft, *best, accepted)
        return None

    def learn_from(self, draft: DraftTree, values: Tensor, ids: Tensor, accepted: Accepted) -> None:
        """Learn from a step with the k best logits and tokens behind each node, [B, n, k]."""
        self.states.observe(
            self._rows,
            self._starts,
            draft.valid.contiguous(),
            values.flatten(0, 1),
            ids.flatten(0, 1),
            accepted,
        )

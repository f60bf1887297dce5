"""The adaptive drafter on a GPU, for captured steps: a copy of its matrix, and its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.adaptive import AdaptiveDrafter, RootRows
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.device import count, learn, propose
from token_recycling.drafting.kernels.device.state import (
    DeviceTables,
    Evidence,
    RootCandidates,
    Texts,
)
from token_recycling.drafting.kernels.device.top_k import device_top_k, is_faster
from token_recycling.drafting.kernels.host.rates import BIN_OF, expected_rates
from token_recycling.drafting.kernels.host.state import LEVELS
from token_recycling.drafting.matrix import STATE
from token_recycling.graph.drafting import LAG, Drafting
from token_recycling.util.tokens import NO_TOKEN


class DeviceMatrix:
    """A drafter's matrix and what was learnt with it, on the device; steps share it.

    It is copied there when an answer begins, and back when it ends.

    Attributes:
        tables: rows, weights and log odds.
        evidence: what weights and log odds are learnt from.
    """

    def __init__(self, drafter: AdaptiveDrafter, device: torch.device) -> None:
        """Allocate it."""
        self._drafter, matrix = drafter, drafter.matrix
        self._learnt = {name: getattr(matrix, name).to(device, copy=True) for name in STATE}
        rates = torch.from_numpy(expected_rates(matrix.k)).to(device, torch.float32)
        learnt = self._learnt
        self.tables = DeviceTables(
            learnt["all_candidates"],
            learnt["all_probabilities"].view(torch.int16),
            learnt["keys"],
            learnt["weights"].float(),
            torch.zeros_like(rates),
            torch.from_numpy(BIN_OF).to(device, torch.int32),
            matrix.vocab_size,
            matrix.pairs,
            matrix.triples,
        )
        self.evidence = Evidence(learnt["evidence"], learnt["weights"], rates)

    def load(self) -> None:
        """Copy it to the device."""
        for name, tensor in self._learnt.items():
            tensor.copy_(getattr(self._drafter.matrix, name))
        self.tables.weights.copy_(self._learnt["weights"])
        self.tables.logits.copy_(torch.from_numpy(self._drafter.logits))

    def store(self) -> None:
        """Copy it back."""
        for name, tensor in self._learnt.items():
            getattr(self._drafter.matrix, name).copy_(tensor)


class DeviceDrafting(Drafting):
    """Drafts like an ``AdaptiveDrafter``, with tensors at fixed addresses on the device."""

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
        device = matrix.evidence.counts.device
        lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self._texts = Texts(
            torch.full((batch, capacity), NO_TOKEN, device=device),
            lengths,
            torch.zeros((batch, max(drafter.chain_length, 1)), device=device).long(),
            torch.zeros_like(lengths),
            torch.zeros_like(lengths),
        )
        none = RootRows.none(batch, drafter.matrix.k)
        self._roots = RootCandidates(
            none.candidates.to(device),
            none.probabilities.view(torch.int16).to(device),
            none.rejected.to(device),
        )
        self._slots = torch.zeros((batch, self.size, LEVELS), device=device).long()
        self._slot_keys = torch.zeros_like(self._slots)
        self._by_blocks: bool | None = None  # whether top-k is; None: not tried

    def begin(self, texts: list[list[int]], roots: Tensor) -> None:
        """Copy the matrix to the device, and the texts, without the next roots."""
        rows = self.drafter.new_rows(len(texts), self._texts.context.shape[1])
        self.drafter.load(rows, texts)
        self._texts.context.copy_(rows.context.tokens)
        self._texts.lengths.copy_(rows.context.lengths)
        self.set_root_rows(rows.root_rows)
        self._matrix.load()

    def set_root_rows(self, rows: RootRows) -> None:
        """Copy root rows to the device."""
        self._roots.candidates.copy_(rows.candidates)
        self._roots.probabilities.copy_(rows.probabilities.view(torch.int16))
        self._roots.rejected.copy_(rows.rejected)

    def end(self) -> None:
        """Copy the matrix back."""
        self._matrix.store()

    def propose(self, roots: Tensor) -> DraftTree:
        """Return drafts of ``size`` nodes below ``roots`` int64 [B]."""
        drafter = self.drafter
        return propose.propose(
            self._texts,
            roots,
            self._roots,
            self._matrix.tables,
            self._slots,
            self._slot_keys,
            drafter.chain_length,
            drafter.max_depth,
        )

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
        vocab_size = self._matrix.tables.vocab_size
        self.learn_from(draft, *self._top_k(logits[..., :vocab_size]), accepted)
        return None

    def learn_from(self, draft: DraftTree, values: Tensor, ids: Tensor, accepted: Accepted) -> None:
        """Learn from a step with the k best logits and tokens behind each node, [B, n, k]."""
        tables = self._matrix.tables
        count.count(
            self._texts,
            self._roots,
            tables,
            self._matrix.evidence,
            draft.valid,
            accepted.emitted,
            self.drafter.learning_rate,
        )
        learn.remember(self._roots, draft, values, ids, accepted)
        learn.learn(
            tables, self._slots, self._slot_keys, draft.valid, values, ids, self.drafter.old_weight
        )

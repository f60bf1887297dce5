"""The adaptive drafter on a GPU: its matrix, the state of many texts, and its kernels.

Importing this module imports Triton.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from token_recycling.drafting.kernels.host.rates import BIN_OF, expected_rates
from token_recycling.drafting.kernels.host.state import LEVELS
from token_recycling.drafting.matrix import STATE, AdjacencyMatrix


class DeviceMatrix:
    """A drafter's matrix and what was learnt with it, on the device.

    Attributes:
        tables: rows, weights and log odds.
        evidence: what weights and log odds are learnt from.
    """

    def __init__(self, drafter: AdaptiveDrafter, device: torch.device) -> None:
        """Allocate it; ``load`` copies what the drafter has learnt."""
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
        _store(self._learnt, self._drafter.matrix)

    def clone(self) -> DeviceSnapshot:
        """Copy it on the device, between the kernels of the current stream, and go on."""
        return DeviceSnapshot(self._learnt, self._drafter.matrix)

    def save(self, path: str | Path) -> None:
        """Write it to a file (see ``AdjacencyMatrix.save``)."""
        self.clone().save(path)


class DeviceSnapshot:
    """A copy of a matrix on the device, which any thread can write to a file."""

    def __init__(self, learnt: dict[str, Tensor], matrix: AdjacencyMatrix) -> None:
        """Copy ``learnt``; ``matrix`` says what else its file states."""
        self._learnt, self._matrix = {name: each.clone() for name, each in learnt.items()}, matrix
        device = learnt["keys"].device
        self._done: Any = None  # recorded when it is copied, on a GPU
        if device.type == "cuda":
            self._done = torch.cuda.current_stream(device).record_event()

    def save(self, path: str | Path) -> None:
        """Copy it to the host, on a stream of its own, and write it."""
        matrix = self._matrix.clone()
        if self._done is None:
            _store(self._learnt, matrix)
        else:
            device = self._learnt["keys"].device
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.device(device), torch.cuda.stream(stream):
                self._done.wait()
                _store(self._learnt, matrix)
        matrix.save(path)


def _store(learnt: dict[str, Tensor], matrix: AdjacencyMatrix) -> None:
    for name, tensor in learnt.items():
        getattr(matrix, name).copy_(tensor)


class DeviceDrafter:
    """Drafts like an ``AdaptiveDrafter`` for S states, each of which belongs to one text.

    All tensors stay at their addresses. A step names the states that take part in it.

    Attributes:
        draft: [S, n], the last draft of each state.
        texts: the texts, and their chains.
        roots: candidates for the next root of each state.
    """

    def __init__(
        self,
        drafter: AdaptiveDrafter,
        matrix: DeviceMatrix,
        context: Tensor,
        size: int,
        *,
        branches: Tensor | None = None,
        reach: int | None = None,
    ) -> None:
        """Allocate the states.

        Args:
            drafter: whose options count.
            matrix: where candidates come from, and what learns.
            context: [S, w], int64 or int32, gets the texts; on the device.
            size: nodes of a draft that is grown, root included.
            branches: bool [S], whether a state drafts only the most likely branch; None: none does.
            reach: how many tokens of a text are searched, from its end; None: all.
        """
        self._drafter, self._matrix, self._branches = drafter, matrix, branches
        self._reach = context.shape[1] if reach is None else reach
        states, device = len(context), context.device
        lengths = torch.zeros(states, dtype=torch.long, device=device)
        self.texts = Texts(
            context,
            lengths,
            torch.zeros((states, max(drafter.chain_length, 1)), device=device).long(),
            torch.zeros_like(lengths),
            torch.zeros_like(lengths),
        )
        none = RootRows.none(states, drafter.matrix.k)
        self.roots = RootCandidates(
            none.candidates.to(device),
            none.probabilities.view(torch.int16).to(device),
            none.rejected.to(device),
        )
        self.draft = _empty(states, size, min(drafter.max_depth, size - 1), device)
        self.slots = torch.zeros((states, size, LEVELS), device=device).long()
        self.slot_keys = torch.zeros_like(self.slots)

    def propose(self, states: Tensor, roots: Tensor) -> None:
        """Write drafts below ``roots`` int64 [S] for ``states`` int64 [B]."""
        drafter = self._drafter
        propose.propose(
            states,
            self.texts,
            roots,
            self.roots,
            self._matrix.tables,
            *(self.draft, self.slots, self.slot_keys),
            drafter.chain_length,
            drafter.max_depth,
            self._reach,
        )
        if self._branches is not None:
            propose.likeliest(states, self._branches, self.draft, self.slots, self.slot_keys)

    def observe(
        self,
        states: Tensor,
        starts: Tensor,
        valid: Tensor,
        values: Tensor,
        ids: Tensor,
        accepted: Accepted,
    ) -> None:
        """Learn from a step, and extend the texts.

        Args:
            states: int64 [B], that took part.
            starts: int64 [B], index of each one's root in values and ids.
            valid: bool [B, n], nodes that were verified.
            values: [m, k], the best logits behind each node.
            ids: int64 [m, k], their tokens.
            accepted: of B rows.
        """
        tables, drafter = self._matrix.tables, self._drafter
        count.count(
            states,
            self.texts,
            self.roots,
            tables,
            self._matrix.evidence,
            valid,
            accepted.emitted,
            drafter.learning_rate,
        )
        learn.remember(
            states,
            starts,
            self.texts,
            self.roots,
            self.draft.parents,
            valid,
            values,
            ids,
            accepted,
        )
        learn.learn(
            states,
            starts,
            tables,
            self.slots,
            self.slot_keys,
            valid,
            values,
            ids,
            drafter.old_weight,
        )


def _empty(states: int, size: int, max_depth: int, device: torch.device) -> DraftTree:
    """Return drafts of ``size`` nodes, none of which is valid."""
    # Each of its own: Triton compiles kernels anew for tensors that begin at odd addresses.
    tokens, parents, depths = (
        torch.zeros((states, size), dtype=torch.long, device=device) for _ in range(3)
    )
    ancestors = torch.zeros((states, size, size), dtype=torch.bool, device=device)
    return DraftTree(
        tokens,
        parents,
        depths,
        ancestors,
        torch.zeros_like(tokens, dtype=torch.bool),
        max_depth,
        torch.zeros_like(tokens, dtype=torch.float32),
    )

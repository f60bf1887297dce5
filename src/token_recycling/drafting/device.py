"""The adaptive drafter on a GPU: its matrix, the state of many texts, and its kernels.

Importing this module imports Triton.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.adaptive import AdaptiveDrafter, RootCandidates
from token_recycling.drafting.kernels.device import count, learn, propose
from token_recycling.drafting.kernels.device.state import DeviceDraft, DeviceTables
from token_recycling.drafting.kernels.host.rates import BIN_OF, expected_rates
from token_recycling.drafting.kernels.host.state import LEVELS, RootArrays, State
from token_recycling.drafting.matrix import STATE, AdjacencyMatrix


class DeviceMatrix:
    """A drafter's matrix and what was learnt with it, on the device.

    Attributes:
        tables: everything learnt.
        sizes: V, P and T.
    """

    def __init__(self, drafter: AdaptiveDrafter, device: torch.device) -> None:
        """Allocate it; ``load`` copies what the drafter has learnt."""
        self._drafter, matrix = drafter, drafter.matrix
        self._learnt = {name: getattr(matrix, name).to(device, copy=True) for name in STATE}
        learnt = self._learnt
        rates = torch.from_numpy(expected_rates(matrix.k)).to(device, torch.float32)
        self.sizes = matrix.vocab_size, matrix.pairs, matrix.triples
        self.tables = DeviceTables(
            learnt["all_candidates"],
            learnt["all_probabilities"].view(torch.int16),
            learnt["keys"],
            learnt["evidence"],
            learnt["weights"],
            rates,
            torch.zeros_like(rates),
            learnt["weights"].float(),
            torch.from_numpy(BIN_OF).to(device, torch.int32),
        )

    def load(self) -> None:
        """Copy it to the device."""
        for name, tensor in self._learnt.items():
            tensor.copy_(getattr(self._drafter.matrix, name))
        self.tables.rounded.copy_(self.tables.weights)
        self.tables.logits.copy_(torch.from_numpy(self._drafter.logits))

    def store(self) -> None:
        """Copy it back."""
        _store(self._learnt, self._drafter.matrix)

    def clone(self) -> _Snapshot:
        """Copy it on the device, between the kernels of the current stream, and go on."""
        return _Snapshot(self._learnt, self._drafter.matrix)

    def save(self, path: str | Path) -> None:
        """Write it to a file (see ``AdjacencyMatrix.save``)."""
        self.clone().save(path)


class _Snapshot:
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
        draft: the last one of each state.
        state: texts, chains, and candidates for the next roots.
        matrix: where candidates come from, and what learns.
        branches: bool [S], whether a state drafts only the most likely branch; None: none does.
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
        self._drafter, self.matrix, self.branches = drafter, matrix, branches
        self._reach = context.shape[1] if reach is None else reach
        states, device = len(context), context.device

        # Each of its own: Triton compiles kernels anew for tensors that begin at odd addresses.
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros((states, *shape), dtype=dtype, device=device)

        none = RootCandidates.none(states, drafter.matrix.k)
        self.state = State(
            context,
            zeros(),
            zeros(max(drafter.chain_length, 1)),
            zeros(),
            zeros(),
            RootArrays(
                none.candidates.to(device),
                none.probabilities.view(torch.int16).to(device),
                none.rejected.to(device),
            ),
        )
        self.draft = DeviceDraft(
            zeros(size),
            zeros(size),
            zeros(size),
            zeros(size, size, dtype=torch.bool),
            zeros(size, dtype=torch.bool),
            zeros(size, dtype=torch.float32),
            zeros(size, LEVELS),
            zeros(size, LEVELS),
        )

    def propose(self, states: Tensor, roots: Tensor) -> None:
        """Write drafts below ``roots`` int64 [S] for ``states`` int64 [B]."""
        matrix, drafter = self.matrix, self._drafter
        propose.propose(
            *(states, self.state, roots, matrix.tables, matrix.sizes),
            *(drafter.max_depth, self.draft, drafter.chain_length, self._reach),
        )
        if self.branches is not None:
            propose.likeliest(states, self.branches, self.draft)

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
        tables, sizes, drafter = self.matrix.tables, self.matrix.sizes, self._drafter
        best = valid, values, ids
        emitted = accepted.emitted
        count.count(states, self.state, valid, emitted, tables, sizes, drafter.learning_rate)
        learn.remember(states, starts, self.state, self.draft.parents, *best, accepted)
        learn.learn(states, starts, self.draft, *best, drafter.old_weight, tables, sizes[0])

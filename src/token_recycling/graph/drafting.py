"""Drafting for a step that runs again and again on the same tensors: on the host, or by kernels."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.candidates import Candidates
from token_recycling.drafting.checked import CheckedDrafter
from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.util.tokens import NO_TOKEN

# Nodes of a draft that the kernels grow: on an H100, trees of 128 and 256 had nodes twice, which
# those of the same code in Triton's interpreter do not have; those of 4 to 64 were the host's.
DEVICE_NODES = 64
LAG = 1  # steps by which the host may be behind


class Drafting:
    """A drafter and its rows, as called by a step that runs many times on the same tensors.

    Only ``propose`` and ``observe`` are part of the graph.

    Attributes:
        drafter: shared with other steps.
        size: nodes of every draft, root included.
        max_depth: of a draft.
        lag: steps that may be launched before the output of the first one is read.
    """

    drafter: AnyDrafter
    size: int
    max_depth: int
    lag: int = 0

    def begin(self, texts: list[list[int]], roots: Tensor) -> None:
        """Load the texts, without the next roots, int64 [B] on the host."""
        raise NotImplementedError

    def end(self) -> None:
        """Store what was learnt in the drafter's matrix, if it is not there already."""

    def prepare(self) -> None:
        """Do what the host must do before each step."""

    def propose(self, roots: Tensor) -> DraftTree:
        """Return drafts of ``size`` nodes below ``roots`` int64 [B]."""
        raise NotImplementedError

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> Tensor | None:
        """Learn from a step, or return what the host needs to do so, int64 [B, m]."""
        raise NotImplementedError

    def learn(self, output: Tensor) -> None:
        """Learn on the host from a step's output, the summary and the result of ``observe``."""


def drafts_on_device(drafter: AnyDrafter, size: int | None) -> TypeGuard[AdaptiveDrafter]:
    """Return whether there are kernels for drafts of ``size`` nodes."""
    if not isinstance(drafter, AdaptiveDrafter):
        return False
    full_size = drafter.nodes + 1
    return min(size or full_size, full_size) <= DEVICE_NODES


class PlainDrafting(Drafting):
    """No drafts: every step verifies the root alone, and nothing is learnt from it."""

    size, max_depth, lag = 1, 0, LAG

    def __init__(self, drafter: AnyDrafter) -> None:
        """Stand in for ``drafter``."""
        self.drafter = drafter

    def begin(self, texts: list[list[int]], roots: Tensor) -> None:
        """Do nothing: the step has the roots."""

    def propose(self, roots: Tensor) -> DraftTree:
        """Return the roots."""
        return root_only(roots)

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> Tensor | None:
        """Learn nothing."""
        return None


class HostDrafting(Drafting):
    """Any drafter: it drafts and learns on the host, before and after each step.

    The draft goes to the device in one copy, and what the drafter learns from comes back with the
    step's summary.
    """

    def __init__(
        self,
        drafter: AnyDrafter,
        batch: int,
        capacity: int,
        size: int | None,
        device: torch.device,
    ) -> None:
        """Make rows for ``batch`` texts of at most ``capacity`` tokens.

        Args:
            drafter: shared with other steps.
            batch: B.
            capacity: most tokens of a row.
            size: most nodes of a draft, root included; None: as many as the drafter proposes.
            device: of the target.
        """
        self.drafter, self.rows = drafter, drafter.new_state(batch, capacity)
        self._roots = torch.zeros(batch, dtype=torch.long, device="cpu")
        self._draft = drafter.propose(self.rows, self._roots, size)
        self.size, self.max_depth = self._draft.size, self._draft.max_depth
        if isinstance(drafter, CheckedDrafter):  # a later draft may be deeper than the first one
            self.max_depth = self.size - 1
        self._on_device = self._draft.pack().to(device)

    def begin(self, texts: list[list[int]], roots: Tensor) -> None:
        """Load the texts, without the next roots, int64 [B] on the host."""
        self.drafter.load(self.rows, texts)
        self._roots = roots

    def prepare(self) -> None:
        """Draft, and copy the draft to the device."""
        self._draft = self.drafter.propose(self.rows, self._roots, self.size).padded(self.size)
        self._on_device.copy_(self._draft.pack())

    def propose(self, roots: Tensor) -> DraftTree:
        """Return the prepared drafts."""
        return DraftTree.unpack(self._on_device, self.max_depth)

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> Tensor | None:
        """Return the paths, and the ids and probabilities of the candidates at every node."""
        matrix = self.drafter.matrix
        values, ids = logits[..., : matrix.vocab_size if matrix else None].topk(self.drafter.k)
        bits = values.float().softmax(dim=-1).view(torch.int32).long()
        return torch.cat([accepted.path, ids.flatten(1), bits.flatten(1)], dim=1)

    def learn(self, output: Tensor) -> None:
        """Learn from a step, whose last tokens are the next roots."""
        shape = (len(output), self.size, self.drafter.k)
        longest, entries = self.max_depth + 1, self.size * self.drafter.k
        _, emitted, path, ids, bits = torch.split(
            output, [1, longest, longest, entries, entries], dim=1
        )
        p = bits.int().view(torch.float32).reshape(shape).numpy()
        counts = (emitted != NO_TOKEN).sum(dim=1)
        self.drafter.observe(
            self.rows,
            self._draft.only(counts > 0),
            Candidates(ids.reshape(shape).numpy(), p, np.isfinite(p).all(axis=-1)),
            Accepted(path, emitted, counts),
        )
        last = emitted.gather(1, (counts - 1).clamp(min=0)[:, None])[:, 0]
        self._roots = torch.where(counts > 0, last, self._roots)

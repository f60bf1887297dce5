"""Drafting within a compiled step: by kernels, or on the host as custom operations."""

from __future__ import annotations

from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.candidates import best_candidates
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.choice import has_device_kernels
from token_recycling.util.modes import ordinary_tensors

_drafting: WeakValueDictionary[str, HostDrafting] = WeakValueDictionary()


class Drafting(Protocol):
    """A drafter and its rows, as called by a step that runs many times on the same tensors.

    Attributes:
        size: nodes of every draft, root included.
        max_depth: of a draft.
    """

    size: int
    max_depth: int

    @property
    def drafter(self) -> AnyDrafter:
        """Return the drafter, which is shared with other steps."""

    def begin(self, texts: list[list[int]]) -> None:
        """Load the texts, without the next roots."""

    def end(self) -> None:
        """Store what was learnt in the drafter's matrix, if it is not there already."""

    def propose(self, roots: Tensor) -> DraftTree:
        """Return drafts of ``size`` nodes below ``roots`` int64 [B]."""

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Learn from a step (see ``Drafter.observe``)."""


def can_draft(drafter: AnyDrafter, device: torch.device) -> bool:
    """Return True if ``drafter`` can be part of a step on ``device``."""
    return device.type == "cpu" or _has_kernels(drafter, device)


def _has_kernels(drafter: AnyDrafter, device: torch.device) -> bool:
    return isinstance(drafter, AdaptiveDrafter) and has_device_kernels(device)


def make_drafting(
    drafter: AnyDrafter, batch: int, capacity: int, size: int | None, device: torch.device
) -> Drafting:
    """Return ``drafter`` and new rows for steps on ``device`` (see ``HostDrafting``)."""
    if _has_kernels(drafter, device):
        from token_recycling.drafting.on_device import DeviceDrafting  # imports Triton

        return DeviceDrafting(cast("Any", drafter), batch, capacity, size, device)
    return HostDrafting(drafter, batch, capacity, size)


class HostDrafting:
    """A drafter and its rows, as called by a compiled step on the CPU.

    The compiler sees two opaque operations, so any drafter can be used. ``order`` is a tensor that
    both claim to modify, which keeps them in order.
    """

    def __init__(self, drafter: AnyDrafter, batch: int, capacity: int, size: int | None) -> None:
        """Make rows for ``batch`` texts of at most ``capacity`` tokens.

        Args:
            drafter: shared with other steps.
            batch: B.
            capacity: most tokens of a row.
            size: most nodes of a draft, root included; None: as many as the drafter proposes.
        """
        self.drafter, self.rows = drafter, drafter.new_rows(batch, capacity)
        draft = drafter.propose(self.rows, torch.zeros(batch, dtype=torch.long, device="cpu"), size)
        self.size, self.max_depth = draft.size, draft.max_depth
        self.order = torch.zeros(1, dtype=torch.long, device="cpu")
        self.key = str(id(self))
        _drafting[self.key] = self

    def begin(self, texts: list[list[int]]) -> None:
        """Load the texts, without the next roots."""
        self.drafter.load(self.rows, texts)

    def end(self) -> None:
        """Do nothing: the drafter has learnt directly."""

    def propose(self, roots: Tensor) -> DraftTree:
        """Return drafts of ``size`` nodes below ``roots`` int64 [B]."""
        tokens, parents, depths, ancestors, valid = torch.ops.token_recycling.propose(
            self.order, self.key, roots, self.size
        )
        return DraftTree(tokens, parents, depths, ancestors, valid, self.max_depth)

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Learn from a step (see ``Drafter.observe``)."""
        parts = (draft.tokens, draft.parents, draft.depths, draft.ancestors, draft.valid)
        chosen = (accepted.path, accepted.emitted, accepted.counts)
        torch.ops.token_recycling.observe(self.order, self.key, *parts, logits, *chosen)


@torch.library.custom_op("token_recycling::propose", mutates_args=("order",))
def _propose(
    order: Tensor, key: str, roots: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    drafting = _drafting[key]
    with ordinary_tensors():
        draft = drafting.drafter.propose(drafting.rows, roots.clone(), size).padded(size)
    parts = (draft.tokens, draft.parents, draft.depths, draft.ancestors, draft.valid)
    # Results of an operation must not share memory.
    tokens, parents, depths, ancestors, valid = (part.clone().contiguous() for part in parts)
    return tokens, parents, depths, ancestors, valid


@_propose.register_fake
def _(order: Tensor, key: str, roots: Tensor, size: int) -> Any:
    batch = roots.shape[0]
    tokens = roots.new_empty(batch, size)
    ancestors = roots.new_empty((batch, size, size), dtype=torch.bool)
    valid = torch.empty_like(tokens, dtype=torch.bool)
    return tokens, torch.empty_like(tokens), torch.empty_like(tokens), ancestors, valid


@torch.library.custom_op("token_recycling::observe", mutates_args=("order",))
def _observe(
    order: Tensor,
    key: str,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    valid: Tensor,
    logits: Tensor,
    path: Tensor,
    emitted: Tensor,
    counts: Tensor,
) -> None:
    drafting = _drafting[key]
    draft = DraftTree(tokens, parents, depths, ancestors, valid, drafting.max_depth)
    with ordinary_tensors():
        accepted = Accepted(path, emitted, counts)
        drafter = drafting.drafter
        vocabulary = drafter.matrix.vocab_size if drafter.matrix else logits.shape[-1]
        candidates = best_candidates(logits[..., :vocabulary], drafter.k)
        drafter.observe(drafting.rows, draft, candidates, accepted)


@_observe.register_fake
def _(*args: Any) -> None:
    return None

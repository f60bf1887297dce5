"""Draft trees as SGLang's kernels want them."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.tree import DraftTree

NONE = -1


def links(draft: DraftTree) -> tuple[Tensor, Tensor]:
    """Return each node's first child and next sibling, int64 [B, n] each; ``NONE``: no such.

    Nodes that stand for nothing are linked to by none, so they are never accepted.
    """
    nodes = torch.arange(draft.nodes, device=draft.tokens.device)
    there = draft.valid.clone()
    there[:, 0] = False
    child = (draft.parents[:, None, :] == nodes[:, None]) & there[:, None, :]
    # [b, i, j]: j hangs below i; [b, i, j] of siblings: j stands behind i and has its parent.
    sibling = (draft.parents[:, :, None] == draft.parents[:, None, :]) & there[:, None, :]
    sibling &= there[:, :, None] & (nodes > nodes[:, None])
    return _first(child), _first(sibling)


def _first(which: Tensor) -> Tensor:
    """Return the first true place in the last dimension, or ``NONE``."""
    return torch.where(which.any(dim=-1), which.long().argmax(dim=-1), NONE)


def full_masks(draft: DraftTree, lengths: Tensor, lengths_cpu: Tensor) -> Tensor:
    """Return who sees what, row after row: bool, flat, of n · (length + n) for each request.

    Args:
        draft: of B rows.
        lengths: [B], committed tokens.
        lengths_cpu: the same on the host.
    """
    batch, n = draft.tokens.shape
    device = draft.tokens.device
    total = n * (int(lengths_cpu.sum()) + batch * n)
    widths = (lengths.long() + n).repeat_interleave(n, output_size=batch * n)
    query = torch.arange(batch * n, device=device).repeat_interleave(widths, output_size=total)
    column = torch.arange(total, device=device) - (widths.cumsum(0) - widths)[query]
    node = column - lengths.long()[query // n]
    above = draft.ancestors.reshape(batch * n, n)[query, node.clamp(min=0)]
    return (node < 0) | above

"""Draft trees in the format of SGLang's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.drafting.draft import DraftTree

NONE = -1


def links(draft: DraftTree) -> tuple[Tensor, Tensor]:
    """Return each node's first child and next sibling, int64 [B, n] each, or ``NONE``.

    No node links to an invalid node, so invalid nodes are never accepted.
    """
    nodes = torch.arange(draft.size, device=draft.tokens.device)
    valid = draft.valid.clone()
    valid[:, 0] = False
    child = (draft.parents[:, None, :] == nodes[:, None]) & valid[:, None, :]
    # child[b, i, j]: j is a child of i; sibling[b, i, j]: j is a later sibling of i.
    sibling = (draft.parents[:, :, None] == draft.parents[:, None, :]) & valid[:, None, :]
    sibling &= valid[:, :, None] & (nodes > nodes[:, None])
    return _first(child), _first(sibling)


def _first(which: Tensor) -> Tensor:
    """Return the index of the first True in the last dimension, or ``NONE``."""
    return torch.where(which.any(dim=-1), which.long().argmax(dim=-1), NONE)


def full_masks(draft: DraftTree, lengths: Tensor, lengths_cpu: Tensor) -> Tensor:
    """Return all requests' masks over context and draft, flattened and concatenated, as bool.

    Each request has n · (length + n) entries.

    Args:
        draft: the draft of B rows.
        lengths: [B], number of committed tokens.
        lengths_cpu: ``lengths`` on the host.
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

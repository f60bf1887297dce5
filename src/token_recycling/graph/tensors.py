"""What a step does around the forward, as operations on tensors: layout and acceptance.

``kernels`` has the same functions for GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skinny_kernels.windows import AttentionWindow, additive_masks
from token_recycling.decoding.accept import accept_choices, step_summary
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.draft import DraftTree
from token_recycling.model.kv_cache import FixedCache


def layout(
    windows: dict[str, AttentionWindow],
    lengths: Tensor,
    draft: DraftTree,
    slots: int,
    most: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | dict[str, Tensor], None]:
    """Place a draft of n nodes behind the longest row of a cache.

    Args:
        windows: by layer type.
        lengths: int64 [B], committed tokens.
        draft: of B rows.
        slots: s, slots of the cache.
        most: number of positions of the model; None: no limit.
        dtype: of the masks.

    Returns:
        Positions int64 [B, n], slots int64 [n], and additive masks [B, 1, n, s], a dict of these
        by layer type if the model has several; and None for paths (see ``kernels.layout``).
    """
    n = draft.size
    every = torch.arange(slots, device=lengths.device)
    end = lengths.max()
    positions = lengths[:, None] + draft.depths
    if most is not None:
        positions = positions.clamp(max=most - 1)
    node = (every - end).expand(len(lengths), -1)
    drafted = (node >= 0) & (node < n)
    node = node.clamp(0, n - 1)
    above = draft.ancestors.gather(2, node[:, None].expand(-1, n, -1))
    visible = torch.where(drafted[:, None], above, (every < lengths[:, None])[:, None])
    key_positions = torch.where(drafted, positions.gather(1, node), every)
    masks = additive_masks(windows, visible, positions, key_positions, dtype)
    return positions, end + every[:n], masks, None


def accept(draft: DraftTree, choices: Tensor, roots: Tensor) -> tuple[Accepted, Tensor]:
    """Accept the longest path of each row; write the next roots; return the summary too.

    Args:
        draft: of B rows.
        choices: int64 [B, n], the target's choice after every node.
        roots: int64 [B], modified in the rows that have not ended.
    """
    accepted = accept_choices(draft, choices)
    last = accepted.emitted.gather(1, (accepted.counts - 1).clamp(min=0)[:, None])[:, 0]
    roots.copy_(torch.where(accepted.counts > 0, last, roots))
    return accepted, step_summary(draft, accepted)


def commit(cache: FixedCache, path: Tensor, counts: Tensor) -> None:
    """Keep the draft's entries on the accepted paths and advance the lengths.

    Entries written after a row's accepted nodes are not committed and are harmless.

    Args:
        cache: of B rows.
        path: int64 [B, p], each row's accepted nodes first.
        counts: int64 [B], number of accepted nodes.
    """
    source = cache.writes_to.slots[path]
    target = cache.lengths[:, None] + torch.arange(path.shape[1], device=path.device)
    rows = torch.arange(cache.batch, device=path.device)[:, None]
    for entries in cache.entries:
        # Not ``scatter``: when compiled, it copies the whole cache.
        entries[rows, :, target] = entries[rows, :, source]
    cache.lengths.add_(counts)

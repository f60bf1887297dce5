"""What a step does around the forward on a GPU: layout, acceptance and commit as Triton kernels.

Shapes use B rows of a batch, n nodes, p nodes of the longest path, s slots of the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skinny_kernels.gpu.launch import launch
from skinny_kernels.gpu.vector import longest
from skinny_kernels.windows import RULES, AttentionWindow
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.draft import DraftTree
from token_recycling.drafting.kernels.device.vector import LEAST_NODES, LEAST_STEPS, at, lanes
from token_recycling.model.kv_cache import FixedCache

SLOTS_AT_ONCE = ENTRIES_AT_ONCE = 1024

# Layout


@triton.jit(do_not_specialize=["batch", "n", "most", "size"])
def _layout(
    lengths,
    depths,
    ancestors,
    positions_out,
    slots_out,
    mask_out,
    paths_out,
    path_depths_out,
    batch,
    n,
    s,
    most,
    size,
    lowest,
    RULE: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the position, slot, mask and path of one node (see ``windows.additive_masks`` and
    ``gpu.attention.paths_of``)."""
    row = tl.program_id(0)
    query = tl.program_id(1)
    end = longest(lengths, batch)
    length = tl.load(lengths + row)
    position = tl.minimum(length + tl.load(depths + row * n + query), most)
    tl.store(positions_out + row * n + query, position)
    if row == 0:
        tl.store(slots_out + query, end + query)
    this = row * n + query
    nodes = tl.arange(0, NODES)
    on_path = tl.load(ancestors + this * n + nodes, mask=nodes < n, other=0).to(tl.int32)
    tl.store(paths_out + this * n + tl.cumsum(on_path, 0) - 1, nodes, mask=on_path != 0)
    tl.store(path_depths_out + this, tl.sum(on_path, 0))
    for begin in range(0, s, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        inside = slot < s
        node = slot - end
        drafted = (node >= 0) & (node < n)
        above = tl.load(ancestors + (row * n + query) * n + node, mask=drafted, other=0) != 0
        visible = tl.where(drafted, above, slot < length)
        if RULE != 0:
            below = tl.load(depths + row * n + node, mask=drafted, other=0)
            key = tl.where(drafted, tl.minimum(length + below, most), slot)
            if RULE == 1:
                visible = visible & (position - key < size)
            else:
                visible = visible & (position // size == key // size)
        mask = tl.where(visible, 0.0, lowest)
        tl.store(mask_out + tl.cast(row * n + query, tl.int64) * s + slot, mask, mask=inside)


# Accept


# A draft that was made on the host is part of a tensor, so that its parts may begin anywhere.
@triton.jit(do_not_specialize=["tokens", "parents", "depths", "valid", "n", "p"])
def _accept(
    tokens,
    parents,
    depths,
    valid,
    choices,
    roots,
    path_out,
    emitted_out,
    counts_out,
    summary_out,
    n,
    p,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Accept the longest path of one row along the choices (see ``walks.longest_paths``)."""
    row = tl.program_id(0)
    node = tl.arange(0, NODES)
    inside = node < n
    place = row * n + node
    token = tl.load(tokens + place, mask=inside, other=0)
    parent = tl.load(parents + place, mask=inside, other=0).to(tl.int32)
    depth = tl.load(depths + place, mask=inside, other=-1).to(tl.int32)
    present = tl.load(valid + place, mask=inside, other=0) != 0
    choice = tl.load(choices + place, mask=inside, other=-1)
    right = present & ((node == 0) | (token == tl.gather(choice, parent, 0)))
    right = right.to(tl.int32)
    accepted = right
    above = parent
    for _ in range(1, p):
        accepted = accepted & tl.gather(right, above, 0)
        above = tl.gather(parent, above, 0)
    reached = tl.where(accepted != 0, depth, -1)
    deepest, last = tl.max(reached, 0, return_indices=True, return_indices_tie_break_left=True)
    # The path from its last node up to the root
    step = tl.arange(0, STEPS)
    path = tl.zeros([STEPS], tl.int64)
    emitted = tl.full([STEPS], -1, tl.int64)
    for i in range(0, p):
        on_path = (step == deepest - i) & (i <= deepest)
        path = tl.where(on_path, last, path)
        emitted = tl.where(on_path, at(choice, node, last), emitted)
        last = at(parent, node, last)
    count = deepest + 1
    root = tl.sum(tl.where(step == deepest, emitted, 0), 0)
    root = tl.where(count > 0, root, tl.load(roots + row))
    tl.store(path_out + row * p + step, path, mask=step < p)
    tl.store(emitted_out + row * p + step, emitted, mask=step < p)
    tl.store(counts_out + row, count.to(tl.int64))
    tl.store(roots + row, root)
    drafted = tl.sum(present.to(tl.int64), 0) - 1
    tl.store(summary_out + row * (p + 1), drafted)
    tl.store(summary_out + row * (p + 1) + 1 + step, emitted, mask=step < p)


# Commit


@triton.jit(do_not_specialize=["batch", "p", "heads", "s"])
def _commit(
    pointers,
    path,
    counts,
    lengths,
    like,
    batch,
    p,
    heads,
    s,
    size,
    BLOCK: tl.constexpr,
):
    """Copy the accepted nodes of one row and one tensor [B, heads, s, size] to its end.

    A node's index is at least its depth, so that no source is overwritten before it is read.
    """
    entries = tl.load(pointers + tl.program_id(0)).to(like.dtype)
    row = tl.program_id(1)
    end = longest(lengths, batch)
    length = tl.load(lengths + row)
    count = tl.load(counts + row)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = place < heads * size
    head = tl.cast(row, tl.int64) * heads + place // size  # int64: a cache may have 2^31 entries
    base = entries + head * s * size + place % size
    for i in range(0, count):
        source = end + tl.load(path + row * p + i)
        value = tl.load(base + source * size, mask=inside)
        tl.store(base + (length + i) * size, value, mask=inside)


# Operations


def layout(
    windows: dict[str, AttentionWindow],
    lengths: Tensor,
    draft: DraftTree,
    slots: int,
    most: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Place a draft behind the longest row (see ``tensors.layout``); return its paths too."""
    last = torch.iinfo(torch.int64).max if most is None else most - 1
    batch, n = draft.depths.shape
    # A drafter may return expanded tensors; the kernel steps from row to row.
    depths, ancestors = draft.depths.contiguous(), draft.ancestors.contiguous()
    positions, draft_slots = depths.new_empty((batch, n)), depths.new_empty(n)
    paths = torch.zeros((batch, n, n), dtype=torch.int32, device=depths.device)
    path_depths = depths.new_empty((batch, n), dtype=torch.int32)
    masks = {}
    for kind, window in windows.items():
        mask = depths.new_empty((batch, n, slots), dtype=dtype)
        launch(
            _layout,
            (batch, n),
            *(lengths, depths, ancestors, positions, draft_slots, mask, paths, path_depths),
            *(batch, n, slots, last, window.size, torch.finfo(dtype).min),
            RULE=RULES.index(window.rule),
            NODES=lanes(n, LEAST_NODES),
            BLOCK=SLOTS_AT_ONCE,
            num_warps=4,
        )
        masks[kind] = mask[:, None]
    mask_or_masks = masks if len(masks) > 1 else next(iter(masks.values()))
    return positions, draft_slots, mask_or_masks, (paths, path_depths)


def accept(draft: DraftTree, choices: Tensor, roots: Tensor) -> tuple[Accepted, Tensor]:
    """Accept the longest path of each row (see ``tensors.accept``)."""
    batch, n = draft.tokens.shape
    deepest = draft.max_depth + 1
    parts = (draft.tokens, draft.parents, draft.depths, draft.valid, choices)
    path, emitted = roots.new_empty((batch, deepest)), roots.new_empty((batch, deepest))
    counts, summary = roots.new_empty(batch), roots.new_empty((batch, deepest + 1))
    launch(
        _accept,
        (batch,),
        *(part.contiguous() for part in parts),
        *(roots, path, emitted, counts, summary, n, deepest),
        NODES=lanes(n, LEAST_NODES),
        STEPS=lanes(deepest, LEAST_STEPS),
        num_warps=1,
    )
    return Accepted(path, emitted, counts), summary


def commit(cache: FixedCache, path: Tensor, counts: Tensor) -> None:
    """Keep the draft's entries on the accepted paths (see ``tensors.commit``)."""
    for entries, pointers in cache.same_shapes:
        commit_entries(entries, pointers, cache.lengths, path, counts)
    cache.lengths.add_(counts)


def commit_entries(
    entries: list[Tensor], pointers: Tensor, lengths: Tensor, path: Tensor, counts: Tensor
) -> None:
    """Keep the draft's entries on the accepted paths in tensors of one shape.

    Args:
        entries: [B, heads, s, size] each.
        pointers: int64, their addresses.
        lengths: int64 [B], committed entries.
        path: see ``commit``.
        counts: likewise.
    """
    batch, heads, slots, size = entries[0].shape
    launch(
        _commit,
        (len(entries), batch, triton.cdiv(heads * size, ENTRIES_AT_ONCE)),
        *(pointers, path, counts, lengths, entries[0]),
        *(batch, path.shape[1], heads, slots, size),
        BLOCK=ENTRIES_AT_ONCE,
        num_warps=4,
    )

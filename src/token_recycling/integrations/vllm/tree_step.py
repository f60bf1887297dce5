"""A step over trees in vLLM: positions before the forward, best path and cache after it.

vLLM schedules a tree as a chain of draft tokens. Cache slots remain those of the chain; positions
and masks are those of the tree. After the forward, the accepted path is moved to the front.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from token_recycling.integrations.vllm import tree_attention
from token_recycling.integrations.vllm.step import StepDrafter, drafted


def place(runner: Any, proposer: StepDrafter, metadata: Any) -> None:
    """Set each node's position from its depth, and pass the trees to the attention backend.

    Args:
        runner: after preparing its inputs, which are modified in place for captured graphs.
        proposer: its drafter, with the trees.
        metadata: vLLM's draft metadata; None: there are no drafts.
    """
    rows = drafted(runner, metadata)
    if not rows:
        tree_attention.use_trees(runner, [])
        return
    begins = _first_tokens(runner, metadata)
    draft = proposer.requests.drafts(slots_of(runner, proposer, rows)).to(proposer.device)
    counts = [metadata.num_draft_tokens[row] + 1 for row in rows]
    owner = torch.repeat_interleave(torch.tensor(counts)).to(proposer.device)
    nodes = torch.cat([torch.arange(count) for count in counts]).to(proposer.device)
    first = torch.tensor([begins[row] for row in rows], device=proposer.device)[owner]
    positions = runner.positions
    positions[first + nodes] = positions[first] + draft.depths[owner, nodes]
    trees: list[Tensor | None] = [None] * len(begins)
    for i, (row, count) in enumerate(zip(rows, counts)):
        trees[row] = draft.ancestors[i, :count, :count]
    tree_attention.use_trees(runner, trees)


def keep_paths(runner: Any, metadata: Any, paths: list[list[int]]) -> None:
    """Move the cache entries of each path's nodes to the front, right after the root.

    Args:
        runner: vLLM's model runner.
        metadata: vLLM's draft metadata.
        paths: nodes of each row, the root first.
    """
    _move(runner, list(zip(_first_tokens(runner, metadata), paths)))


def _first_tokens(runner: Any, metadata: Any) -> list[int]:
    """Return the index of each row's root among the tokens of the batch."""
    ends = runner.query_start_loc.np[1 : len(metadata.num_draft_tokens) + 1].tolist()
    return [end - drafts - 1 for end, drafts in zip(ends, metadata.num_draft_tokens)]


def slots_of(runner: Any, proposer: StepDrafter, rows: list[int]) -> Tensor:
    """Return the request slots of ``rows``, int64."""
    names = runner.input_batch.req_ids
    return torch.tensor([proposer.slot(names[row]) for row in rows], device="cpu")


def _move(runner: Any, paths: list[tuple[int, list[int]]]) -> None:
    """Copy the cache entries of each path's nodes to the slots right after its root."""
    moves = [
        (begin + node, begin + place)
        for begin, nodes in paths
        for place, node in enumerate(nodes)
        if place != node
    ]
    if not moves:
        return
    layers = runner.compilation_config.static_forward_context
    moved = set()
    groups = runner.kv_cache_config.kv_cache_groups
    for group, table in zip(groups, runner.input_batch.block_table.block_tables):
        slots = table.slot_mapping.gpu
        source, target = slots[torch.tensor(moves, device=slots.device).T].long()
        for name in group.layer_names:
            cache = layers[name].kv_cache
            if cache.data_ptr() in moved:  # layers may use the same cache
                continue
            moved.add(cache.data_ptr())
            tree_attention.copy_slots(cache, source, target)

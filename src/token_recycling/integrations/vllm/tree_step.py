"""A step over trees in vLLM: positions before the forward, the walk and the cache after it.

vLLM schedules a tree as a chain of drafts. Their cache slots stay those of the chain; positions
and masks are those of the tree. After the forward the best path moves to the front, and is
verified by vLLM as a chain: so sampling, penalties and logprobs are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from token_recycling.integrations.vllm import tree_attention
from token_recycling.integrations.vllm.step import VerifiedStep, drafted

if TYPE_CHECKING:
    from token_recycling.integrations.vllm.proposer import Proposer


def place(runner: Any, proposer: Proposer, metadata: Any) -> None:
    """Put every node at the position of its depth, and tell the attention who sees whom.

    Args:
        runner: has prepared its inputs; changed in place, as captured graphs need it.
        proposer: knows the trees.
        metadata: vLLM's, of the drafts; None: there are none.
    """
    rows = drafted(runner, metadata)
    if not rows:
        tree_attention.use_trees(runner, [])
        return
    begins = _first_tokens(runner, metadata)
    draft = proposer.requests.drafts(_slots(runner, proposer, rows))
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


@contextmanager
def walked(runner: Any, proposer: Proposer, logits: Tensor, metadata: Any) -> Iterator[Any]:
    """Give logits and metadata of the best path of every tree, as if it alone had been drafted.

    Where no path goes beyond its root the metadata are None.

    The path goes on to whichever child the target finds likeliest, so it depends on the tokens
    before it alone, and verifying it by rejection sampling keeps the distribution.
    """
    rows = drafted(runner, metadata)
    if not rows:
        yield logits, metadata
        return
    step = VerifiedStep(runner, logits, metadata)
    answers = step.answers(rows)
    draft = proposer.requests.drafts(_slots(runner, proposer, rows)).first(answers.shape[1])
    counts = torch.tensor([step.counts[row] for row in rows], device=logits.device)
    draft = draft.up_to(counts)
    path, lengths = draft.best_branch(answers)
    tokens = draft.tokens.gather(1, path).tolist()
    paths = [nodes[:length] for nodes, length in zip(path.tolist(), lengths.tolist())]
    begins = _first_tokens(runner, metadata)
    _move(runner, [(begins[row], nodes) for row, nodes in zip(rows, paths)])

    drafts: list[list[int]] = [[] for _ in step.counts]
    kept = [[start] for start in step.starts]
    for row, nodes, found in zip(rows, paths, tokens):
        drafts[row] = found[1 : len(nodes)]
        kept[row] = [step.starts[row] + node for node in nodes]
    index = torch.tensor([i for row in kept for i in row], device=logits.device)
    if not any(drafts):
        yield logits[index], None
        return
    numbers = np.array(list(map(len, drafts)), dtype=np.int32)
    chain = runner._calc_spec_decode_metadata(numbers, np.cumsum(numbers + 1, dtype=np.int32))
    flat = [token for row in drafts for token in row]
    ids = torch.tensor(flat, dtype=torch.int32, device=logits.device)
    # Penalties count the drafts in front of each token.
    in_front = runner.input_batch.spec_token_ids
    before = in_front[: len(drafts)]
    in_front[: len(drafts)] = drafts
    try:
        yield logits[index], replace(chain, draft_token_ids=ids)
    finally:
        in_front[: len(drafts)] = before


def _first_tokens(runner: Any, metadata: Any) -> list[int]:
    """Of every row the root's place among the tokens of the batch."""
    ends = runner.query_start_loc.np[1 : len(metadata.num_draft_tokens) + 1].tolist()
    return [end - drafts - 1 for end, drafts in zip(ends, metadata.num_draft_tokens)]


def _slots(runner: Any, proposer: Proposer, rows: list[int]) -> Tensor:
    names = runner.input_batch.req_ids
    return torch.tensor([proposer.slot(names[row]) for row in rows], device=proposer.device)


def _move(runner: Any, paths: list[tuple[int, list[int]]]) -> None:
    """Copy the cache entries of each path's nodes to the slots right behind the root."""
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
            if cache.data_ptr() in moved:  # layers may share one
                continue
            moved.add(cache.data_ptr())
            tree_attention.copy_slots(cache, source, target)

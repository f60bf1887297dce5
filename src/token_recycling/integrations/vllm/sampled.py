"""Sampling along drafts for CPUs: every token is drawn as it would be without speculation.

vLLM's sampler draws the token after the root. While that token is drafted, the token after it is
drawn from the logits of its node, and so on. Each token takes one draw of its request's generator,
so a seed gives the text that it gives without drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import SamplerOutput

from token_recycling.decoding.walks import Children, children_of, follow
from token_recycling.integrations.vllm import tree_step
from token_recycling.integrations.vllm.step import StepDrafter, VerifiedStep, drafted
from token_recycling.util.tokens import padded


def any_drafted(runner: Any, metadata: Any) -> bool:
    """Return whether a request that samples has a draft in this step."""
    batch = runner.input_batch
    return any(
        count and runner.requests[name].sampling_params.temperature > 0
        for name, count in zip(batch.req_ids, metadata.num_draft_tokens)
    )


def sample(runner: Any, proposer: StepDrafter, logits: Tensor, metadata: Any) -> Any:
    """Return the output of vLLM's sampler for a step with drafts of sampled requests.

    Args:
        runner: vLLM's model runner.
        proposer: its drafter.
        logits: [sum of nodes, V], of every root and draft node.
        metadata: vLLM's draft metadata.
    """
    step = VerifiedStep(runner, logits, metadata)
    sampling = runner.input_batch.sampling_metadata
    children = _children(runner, proposer, step, metadata)
    if not step.can_walk:  # a request that joined this step; no draft is used
        children = [{} for _ in step.counts]
    at, output = list(step.starts), None

    def choose(rows: list[int], nodes: list[int]) -> list[int]:
        nonlocal output
        for row, node in zip(rows, nodes):
            at[row] = step.starts[row] + node
        generators = {row: g for row, g in sampling.generators.items() if row in rows}
        output = runner.sampler(
            logits=logits[torch.tensor(at, device=logits.device)],
            sampling_metadata=replace(sampling, generators=generators),
        )
        tokens = output.sampled_token_ids[:, 0].tolist()
        return [tokens[row] for row in rows]

    paths, emitted = follow(list(range(len(step.counts))), children, choose)
    longest = max(map(len, emitted))
    if longest == 1:
        return output
    if proposer.tree:
        tree_step.keep_paths(runner, metadata, paths)
    ids = torch.tensor(padded(emitted), dtype=torch.int32, device=logits.device)
    return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=None)


def _children(
    runner: Any, proposer: StepDrafter, step: VerifiedStep, metadata: Any
) -> list[Children]:
    """Return the verified nodes of each row by parent and token."""
    by_row: list[Children] = [{} for _ in step.counts]
    if not proposer.tree:
        tokens = metadata.draft_token_ids.tolist()
        begin = 0
        for row, count in enumerate(metadata.num_draft_tokens):
            row_tokens = tokens[begin : begin + count]
            by_row[row] = {(i, token): i + 1 for i, token in enumerate(row_tokens)}
            begin += count
        return by_row
    rows = drafted(runner, metadata)
    draft = proposer.requests.drafts(tree_step.slots_of(runner, proposer, rows))
    verified = draft.up_to(torch.tensor([step.counts[row] for row in rows], device="cpu"))
    for row, children in zip(rows, children_of(verified)):
        by_row[row] = children
    return by_row

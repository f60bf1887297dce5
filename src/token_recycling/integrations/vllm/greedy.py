"""Greedy acceptance of chains on CPUs, from the candidates that the drafter learns from anyway."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput

from token_recycling.integrations.engines.chains import accept_chains
from token_recycling.integrations.vllm.step import StepDrafter, VerifiedStep
from token_recycling.util.compiled import as_array


def sample(proposer: StepDrafter, step: VerifiedStep, metadata: Any) -> Any:
    """Return the output of a sampler for chains of which every token is the best one.

    Args:
        proposer: vLLM's drafter.
        step: in which every request takes the best token.
        metadata: vLLM's draft metadata.
    """
    choices = proposer.requests.choices(step.logits)
    drafted = as_array(metadata.draft_token_ids)
    emitted = accept_chains(drafted, choices, step.counts, metadata.max_spec_len + 1)
    return SamplerOutput(sampled_token_ids=torch.from_numpy(emitted), logprobs_tensors=None)

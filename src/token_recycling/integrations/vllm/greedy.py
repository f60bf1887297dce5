"""Greedy acceptance of chains on CPUs, from the candidates that the drafter learns from anyway."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput

from token_recycling.compiled import as_array, compiled
from token_recycling.integrations.vllm.step import StepDrafter, VerifiedStep
from token_recycling.tokens import NO_TOKEN


def sample(proposer: StepDrafter, step: VerifiedStep, metadata: Any) -> Any:
    """Return each row's tokens up to the first that its chain has not foreseen.

    Args:
        proposer: vLLM's drafter.
        step: in which every request takes the best token.
        metadata: vLLM's draft metadata.
    """
    choices = proposer.requests.choices(step.answers)
    counts = np.array(step.counts)
    emitted = np.full((len(counts), metadata.max_spec_len + 1), NO_TOKEN, np.int32)
    _accept(as_array(metadata.draft_token_ids), choices, counts, emitted)
    return SamplerOutput(sampled_token_ids=torch.from_numpy(emitted), logprobs_tensors=None)


def compile_acceptance() -> None:
    """Compile what ``sample`` calls, before the first request."""
    choices = np.zeros(1, np.int64)
    _accept(np.zeros(0, np.int32), choices, np.ones(1, np.int64), np.zeros((1, 1), np.int32))


@compiled
def _accept(drafted: Any, choices: Any, counts: Any, emitted: Any) -> None:
    """Compare chains with what the target has chosen.

    Args:
        drafted: int32 [sum of counts - B], the drafted tokens of all rows.
        choices: int64 [sum of counts], the target's choice after each root and drafted token.
        counts: int64 [B], choices of each row.
        emitted: int32 [B, t], gets the tokens of each row.
    """
    first, begin = 0, 0  # of the row's choices, and of its drafted tokens
    for row in range(len(counts)):
        for i in range(counts[row]):
            emitted[row, i] = choices[first + i]
            if i == counts[row] - 1 or drafted[begin + i] != choices[first + i]:
                break
        first += counts[row]
        begin += counts[row] - 1

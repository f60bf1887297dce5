"""Sampled requests on CPUs, where SGLang's own verification always takes the best token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from sglang.srt.speculative import ngram_worker
from torch import Tensor

from token_recycling.integrations.engines.versions import check_signature

CERTAIN = 1e30  # a logit that no penalty or bias makes less than the others


def draw_on_cpus(sampler: Any) -> None:
    """Make this process's verification draw the tokens of batches with sampled requests.

    Without this, SGLang ignores the temperature on CPUs with drafts of any kind.

    Args:
        sampler: SGLang's, which draws one token per request from logits [B, vocabulary].

    Raises:
        EngineVersionError: SGLang's interface has changed.
    """
    check_signature(
        ngram_worker.eagle_sample,
        "verify_input",
        "batch",
        "logits_output",
        "grammar_mask",
        "uno_target_max_top_k",
        "watermark_state",
        "watermark_full_mask",
    )
    ngram_worker.eagle_sample = _drawing(ngram_worker.eagle_sample, sampler)


def _drawing(verify: Callable[..., Any], sampler: Any) -> Callable[..., Any]:
    @wraps(verify)
    def eagle_sample(
        verify_input: Any, batch: Any, logits_output: Any, grammar_mask: Any = None, **options: Any
    ) -> Any:
        # Applies penalties, biases and grammars to the logits, in place.
        best = verify(verify_input, batch, logits_output, grammar_mask, **options)
        if batch.sampling_info.is_all_greedy:
            return best
        drawn = _drawn(verify_input, batch, logits_output, sampler)
        certain = replace(logits_output, next_token_logits=drawn)
        return verify(verify_input, batch, certain, None, **options)

    return eagle_sample


def _drawn(verify_input: Any, batch: Any, logits_output: Any, sampler: Any) -> Tensor:
    """Draw a token at every node from the root down, as long as it was drafted.

    Returns:
        Logits [B · n, vocabulary], in which the drawn tokens are the best ones of their nodes.
    """
    logits: Tensor = logits_output.next_token_logits
    n, rows = verify_input.draft_token_num, len(batch.seq_lens)
    tokens = verify_input.draft_token.view(rows, n)
    children, siblings = verify_input.retrieve_next_token, verify_input.retrieve_next_sibling
    first, every = torch.arange(rows) * n, torch.arange(rows)
    node, going = torch.zeros(rows, dtype=torch.long), torch.ones(rows, dtype=torch.bool)
    drawn = torch.zeros_like(logits)
    while going.any():
        at = first + node
        here = replace(logits_output, next_token_logits=logits[at])  # a copy: it is written to
        positions = verify_input.positions[at]
        token = sampler(here, batch.sampling_info, False, [0] * rows, [None] * rows, positions)
        drawn[at[going], token.long()[going]] = CERTAIN
        child = children[every, node]
        while (wrong := (child >= 0) & (tokens[every, child] != token)).any():
            child = torch.where(wrong, siblings[every, child], child)
        going &= child >= 0
        node = torch.where(going, child, node)
    return drawn

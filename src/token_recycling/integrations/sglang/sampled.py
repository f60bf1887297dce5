"""Sampled requests on CPUs, where SGLang's own verification always takes the best token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from sglang.srt.speculative import ngram_worker
from torch import Tensor

from token_recycling.decoding.walks import Children, follow
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
    n, size = verify_input.draft_token_num, len(batch.seq_lens)
    drawn = torch.zeros_like(logits)

    def choose(rows: list[int], nodes: list[int]) -> list[int]:
        for row, node in zip(rows, nodes):
            at[row] = row * n + node
        here = replace(logits_output, next_token_logits=logits[at])  # a copy: it is written to
        positions = verify_input.positions[at]
        tokens = sampler(here, batch.sampling_info, False, [0] * size, [None] * size, positions)
        drawn[at[rows], tokens.long()[rows]] = CERTAIN
        chosen: list[int] = tokens[rows].tolist()
        return chosen

    at = torch.arange(size) * n
    follow(list(range(size)), _children(verify_input, size), choose)
    return drawn


def _children(verify_input: Any, size: int) -> list[Children]:
    """Return the nodes of each request by parent and token; of equal siblings the first."""
    n = verify_input.draft_token_num
    tokens = verify_input.draft_token.view(size, n).tolist()
    first, sibling = verify_input.retrieve_next_token, verify_input.retrieve_next_sibling
    by_row: list[Children] = [{} for _ in range(size)]
    for row, (firsts, siblings) in enumerate(zip(first.tolist(), sibling.tolist())):
        for parent, child in enumerate(firsts):
            while child >= 0:
                by_row[row].setdefault((parent, tokens[row][child]), child)
                child = siblings[child]
    return by_row

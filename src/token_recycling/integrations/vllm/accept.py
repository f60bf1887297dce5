"""Acceptance on CPUs: every token is chosen as it would be without speculation.

vLLM's sampler chooses the token after the root. While that token is drafted, the token after it is
chosen from the logits of its node, and so on. Each token takes one draw of its request's generator,
so a seed gives the text that it gives without drafts.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor

from token_recycling.decoding.walks import Children, children_of, follow
from token_recycling.integrations.vllm import tree_attention
from token_recycling.integrations.vllm.step import StepDrafter, VerifiedStep, drafted
from token_recycling.util.tokens import padded


def accept(
    runner: Any, proposer: StepDrafter, step: VerifiedStep, logits: Tensor, metadata: Any
) -> Any:
    """Return the output of a sampler for a step with drafts.

    Args:
        runner: vLLM's model runner.
        proposer: its drafter.
        step: that was verified.
        logits: [sum of nodes, V], of every root and draft node, as a grammar has left them.
        metadata: vLLM's draft metadata.
    """
    children = _children(runner, proposer, step, metadata)
    rows = list(range(len(step.counts)))
    if step.takes_best:
        best, starts = proposer.requests.choices(step.logits).tolist(), step.starts
        paths, emitted = follow(
            rows, children, lambda at, nodes: [best[starts[r] + n] for r, n in zip(at, nodes)]
        )
        logprobs = None
    else:
        draws = _Draws(runner, logits, step.starts)
        paths, emitted = follow(rows, children, draws.choose)
        logprobs = draws.logprobs()
    if proposer.tree:
        tree_attention.keep_paths(runner, metadata, paths)
    ids = torch.tensor(padded(emitted), dtype=torch.int32, device=logits.device)
    return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=logprobs)


class _Draws:
    """vLLM's sampler, applied at one node of every row at a time."""

    def __init__(self, runner: Any, logits: Tensor, starts: list[int]) -> None:
        """Draw from ``logits`` [sum of nodes, V], of which ``starts`` are the rows' roots."""
        self._sampler, self._logits, self._starts = runner.sampler, logits, starts
        self._metadata = runner.input_batch.sampling_metadata
        self._at = list(starts)
        self._emitted: list[list[int]] = [[] for _ in starts]
        self._outputs: list[Any] = []

    def choose(self, rows: list[int], nodes: list[int]) -> list[int]:
        """Return the tokens after ``nodes``, one of each of ``rows``."""
        for row, node in zip(rows, nodes):
            self._at[row] = self._starts[row] + node
        output = self._sampler(
            logits=self._logits[torch.tensor(self._at, device=self._logits.device)],
            sampling_metadata=self._after(rows),
        )
        self._outputs.append(output)
        tokens = output.sampled_token_ids[:, 0].tolist()
        for row in rows:
            self._emitted[row].append(tokens[row])
        return [tokens[row] for row in rows]

    def logprobs(self) -> Any:
        """Return the log probabilities at all depths, [B · depths, …]; None: nobody asked."""
        found = [output.logprobs_tensors for output in self._outputs]
        if found[0] is None:
            return None
        return LogprobsTensors(
            *(torch.stack(depths, dim=1).flatten(0, 1) for depths in list(zip(*found))[:3])
        )

    def _after(self, rows: list[int]) -> Any:
        """Return vLLM's sampling metadata after the tokens emitted so far.

        Only ``rows`` draw from their generators.
        """
        metadata = self._metadata
        generators = {row: g for row, g in metadata.generators.items() if row in rows}
        if not self._outputs:
            return replace(metadata, generators=generators)
        texts = [[*text, *new] for text, new in zip(metadata.output_token_ids, self._emitted)]
        processors = metadata.logitsprocs
        if any(map(_is_pending, processors.all)):
            processors = LogitsProcessors(_after(one, self._emitted) for one in processors.all)
        return replace(
            metadata, generators=generators, output_token_ids=texts, logitsprocs=processors
        )


def _is_pending(processor: Any) -> bool:
    """Return whether a logits processor depends on how many tokens were emitted."""
    return isinstance(processor, MinTokensLogitsProcessor) and bool(processor.min_toks)


def _after(processor: Any, emitted: list[list[int]]) -> Any:
    """Return a logits processor as it is after ``emitted`` tokens of each row."""
    if not _is_pending(processor):
        return processor
    later = copy(processor)
    later.min_toks = {
        row: (least, [*text, *emitted[row]], *others)
        for row, (least, text, *others) in processor.min_toks.items()
    }
    later.update_state(None)  # drops the rows that are long enough now
    return later


def _children(
    runner: Any, proposer: StepDrafter, step: VerifiedStep, metadata: Any
) -> list[Children]:
    """Return the verified nodes of each row by parent and token."""
    by_row: list[Children] = [{} for _ in step.counts]
    if not step.can_walk:  # since a request has joined; no draft is used
        return by_row
    if not proposer.tree:
        tokens = metadata.draft_token_ids.tolist()
        begin = 0
        for row, count in enumerate(metadata.num_draft_tokens):
            row_tokens = tokens[begin : begin + count]
            by_row[row] = {(i, token): i + 1 for i, token in enumerate(row_tokens)}
            begin += count
        return by_row
    rows = drafted(runner, metadata)
    if not rows:
        return by_row
    draft = proposer.requests.drafts(tree_attention.slots_of(runner, proposer, rows))
    verified = draft.up_to(torch.tensor([step.counts[row] for row in rows], device="cpu"))
    for row, children in zip(rows, children_of(verified)):
        by_row[row] = children
    return by_row

"""What the drafter needs to know about a step verified by vLLM."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

from token_recycling.integrations.engines.requests import RequestDrafter
from token_recycling.integrations.engines.step_logits import StepLogits

# The logits processors that can be told what has been emitted in a step.
BUILT_IN = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)
PLACEHOLDER = -1  # vLLM's draft token for requests that have just joined a decoding batch


class StepDrafter:
    """What the hooks need of a ``Proposer``, which is one.

    Attributes:
        tree: whether drafts are trees.
        recurrent: whether the model has recurrent layers.
        requests: the drafter, and its state of every request.
        step: the one to learn from, during ``sample_tokens``.
    """

    tree: bool
    recurrent: bool
    requests: RequestDrafter
    step: VerifiedStep | None

    def slot(self, request: str) -> int | None:
        """Return the slot of a request, or None when nothing was drafted for it yet."""
        raise NotImplementedError


def drafted(runner: Any, metadata: Any) -> list[int]:
    """Return the rows of the batch that verify our drafts and still have a slot."""
    if metadata is None:
        return []
    batch = runner.input_batch
    return [
        row
        for row, drafts in enumerate(metadata.num_draft_tokens)
        if drafts
        and batch.spec_token_ids[row][0] != PLACEHOLDER
        and runner.drafter.slot(batch.req_ids[row]) is not None
    ]


class VerifiedStep:
    """The logits of a batch, one vector for each root and draft token.

    Attributes:
        requests: request ids by row of the batch.
        counts: number of logits vectors of each row.
        sizes: how many of these belong to a draft of ours, root included.
        logits: of all nodes, before a grammar or penalty changes them.
        scheduled: tokens that the step has read, prompts included.
        constrained: whether a grammar restricts what may be chosen.
    """

    def __init__(
        self, runner: Any, logits: Tensor, metadata: Any, scheduled: int, constrained: bool
    ) -> None:
        """Record a step.

        Args:
            runner: vLLM's model runner.
            logits: [sum of counts, V], concatenated by row.
            metadata: vLLM's draft metadata; None: a step of plain decoding.
            scheduled: see above.
            constrained: see above.
        """
        self._runner, self.scheduled, self.constrained = runner, scheduled, constrained
        self.requests: list[str] = list(runner.input_batch.req_ids)
        self.counts = self.sizes = [1] * len(self.requests)
        if metadata is not None:
            self.counts = [drafts + 1 for drafts in metadata.num_draft_tokens]
            for row in drafted(runner, metadata):
                self.sizes[row] = self.counts[row]
        self.logits = StepLogits(logits, self.counts)

    @property
    def starts(self) -> list[int]:
        """Index of each row's first logits."""
        return self.logits.starts

    @property
    def decoding(self) -> bool:
        """Whether the step has read no prompt."""
        return self.scheduled == sum(self.counts)

    @cached_property
    def can_walk(self) -> bool:
        """Whether each token can be chosen from its logits and the tokens before it.

        Then drafts can be followed token by token (see ``accept``).
        """
        sampling = self._runner.input_batch.sampling_metadata
        budget = sampling.thinking_budget_state_holder
        return not (budget is not None and budget.has_tracked_requests()) and all(
            isinstance(processor, BUILT_IN) for processor in sampling.logitsprocs.all
        )

    @cached_property
    def takes_best(self) -> bool:
        """Whether every request takes the token of the highest logit."""
        sampling = self._runner.input_batch.sampling_metadata
        return (
            sampling.all_greedy
            and not self.constrained
            and self.can_walk
            and sampling.max_num_logprobs is None
            and not sampling.logprob_token_ids
            and sampling.no_penalties
            and not sampling.bad_words_token_ids
            and sampling.allowed_token_ids_mask is None
            and not any(
                getattr(processor, "min_toks", None) or getattr(processor, "biases", None)
                for processor in sampling.logitsprocs.all
            )
        )

    def lives(self, request: str) -> bool:
        """Return whether a request has not ended yet."""
        return request in self._runner.requests

    def structured(self, row: int) -> bool:
        """Return whether a grammar checks the row's drafts, which works for chains only."""
        params = self._runner.requests[self.requests[row]].sampling_params
        return params is not None and params.structured_outputs is not None

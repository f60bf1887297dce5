"""The drafter class that vLLM calls, instantiated once per worker process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform

from token_recycling.errors import TokenRecyclingError
from token_recycling.integrations.engines.requests import RequestDrafter, same_on_all_ranks
from token_recycling.integrations.engines.versions import VLLM, check_version
from token_recycling.integrations.vllm import hooks, tree_attention
from token_recycling.integrations.vllm.options import (
    CHAIN_FROM,
    METHOD,
    options_of,
    tokenizer_of,
)
from token_recycling.integrations.vllm.step import StepDrafter, VerifiedStep
from token_recycling.util.tokens import padded


class Proposer(StepDrafter):
    """Drafts for the requests of one worker, and learns from the logits captured by the hooks.

    vLLM creates it with its configuration, calls ``load_model`` once and ``propose`` after every
    step. Options: see ``VllmOptions``.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Read the options and install the hooks.

        Raises:
            TokenRecyclingError: the vLLM version, an option, or the model with ``mode=tree`` is
                not supported; the message says why.
        """
        check_version(VLLM)
        options = options_of(vllm_config)
        if options is None or not current_platform.is_cpu():
            raise TokenRecyclingError(
                f"this class cannot be configured directly: set the method {METHOD!r} in "
                "speculative_config, without a model"
            )
        self.options, self.tree = options, options.mode == "tree"
        if self.tree:
            tree_attention.check_model(vllm_config)
            tree_attention.register()
        hooks.install()
        max_drafted: int = vllm_config.speculative_config.num_speculative_tokens
        self.largest = max_drafted + 1
        grown = max_drafted if self.tree else max(CHAIN_FROM, 2 * max_drafted)
        vocabulary: int = vllm_config.model_config.get_vocab_size()
        self.limit: int = vllm_config.model_config.max_model_len
        requests: int = vllm_config.scheduler_config.max_num_seqs
        model = vllm_config.model_config
        self.recurrent: bool = model.is_hybrid or model.is_attention_free
        self.requests = RequestDrafter(
            options.make(vocabulary, grown, partial(tokenizer_of, model)),
            requests,
            self.largest,
            context=options.context,
            chain=not self.tree,
        )
        first = vllm_config.parallel_config.rank == 0
        self._keeper = options.keeper(self.requests.drafter) if first else None
        self._unused_slots = list(range(requests))
        self._slots: dict[str, int] = {}
        self._lengths: dict[str, int] = {}  # tokens of each request seen so far
        self.step = None
        # Ranks measure different times, but must verify the same trees.
        ranks = vllm_config.parallel_config.tensor_parallel_size
        alone = ranks == 1 or not self.tree
        self.draft_size = options.size(self.requests.drafter, "cpu") if alone else None
        self._began, self._requests = perf_counter(), list[str]()

    def load_model(self, model: Any) -> None:
        """Do nothing: there is no draft model."""

    def slot(self, request: str) -> int | None:
        """Return the slot of a request, or None if it has none."""
        return self._slots.get(request)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
        **others: Any,
    ) -> list[list[int]]:
        """Learn from the last step and draft for the next.

        Args:
            sampled_token_ids: new tokens of each row; empty in the middle of a prompt.
            num_tokens_no_spec: number of tokens of each row, including the new ones.
            token_ids_cpu: [rows, max_model_len].
            slot_mappings: unused.
            **others: unused.

        Returns:
            Draft tokens of each row. In a tree, parents come before children, so that vLLM may
            truncate the list.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        step = self.step
        if step is None:
            return drafts
        self._forget(step)
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        emitted = [sampled_token_ids[row] for row in rows]
        if not rows:
            return drafts
        self._record(step, rows, emitted)
        size = self.options.size_for(len(rows), self.largest)
        if size > 1 and (self.draft_size is None or self.draft_size.pays):
            lengths = [int(num_tokens_no_spec[row]) for row in rows]
            self._learn_and_draft(step, rows, emitted, lengths, token_ids_cpu, size, drafts)
        return drafts

    @torch.inference_mode(False)
    @torch.no_grad()
    def _learn_and_draft(
        self,
        step: VerifiedStep,
        rows: list[int],
        emitted: list[list[int]],
        lengths: list[int],
        token_ids: Any,
        size: int,
        drafts: list[list[int]],
    ) -> None:
        """Write the next drafts of ``rows`` to ``drafts``; the other arguments: see ``propose``."""
        # False for a row whose draft could not be verified
        may_draft = [
            step.can_walk and length < self.limit and not (self.tree and step.structured(row))
            for row, length in zip(rows, lengths)
        ]
        if not any(may_draft):
            return
        requests = [step.requests[row] for row in rows]
        new: dict[str, list[int]] = {}
        for row, request, length, tokens in zip(rows, requests, lengths, emitted):
            before = length - len(tokens)
            if self._lengths.get(request) != before:
                new[request] = token_ids[row, :before].tolist()
            self._lengths[request] = length
        if new:
            self._begin(new, step)
        slots = torch.tensor([self._slots[request] for request in requests], device="cpu")
        sizes = [step.sizes[row] for row in rows]
        self.requests.observe(slots, step.logits, rows, sizes, torch.tensor(padded(emitted)))
        if self._keeper is not None:
            self._keeper.tick()
        for row, draft in zip(rows, self._draft(slots, emitted, size, may_draft)):
            drafts[row] = draft

    def _draft(
        self, slots: Tensor, emitted: list[list[int]], size: int, may_draft: list[bool]
    ) -> list[list[int]]:
        """Return the tokens of the drafts below the last emitted tokens, without these."""
        roots = torch.tensor([tokens[-1] for tokens in emitted], device="cpu")
        draft = self.requests.propose(slots, roots, size)
        if self.tree:
            draft = same_on_all_ranks(get_tp_group(), draft)
            self.requests.replace_drafts(slots, draft)
        valid = draft.valid.numpy()[:, 1:] & np.array(may_draft)[:, None]
        # Number of nodes up to the last valid one
        used = (valid * np.arange(1, valid.shape[1] + 1)).max(axis=1, initial=0)
        if self.draft_size is not None and draft.scores is not None:
            permitted = replace(draft, valid=torch.from_numpy(np.pad(valid, ((0, 0), (1, 0)))))
            used = np.minimum(used, self.draft_size.choose_each(permitted))
        return [
            tokens[:count]
            for tokens, count in zip(draft.tokens.numpy()[:, 1:].tolist(), used.tolist())
        ]

    def _record(self, step: VerifiedStep, rows: list[int], emitted: list[list[int]]) -> None:
        """Tell the draft-size policy what the step brought, and how many rows there are now.

        The time between two calls is that of drafting and of the step itself. It counts if the same
        requests took part in both, and no prompt was read.
        """
        now = perf_counter()
        seconds, before = now - self._began, self._requests
        self._began, self._requests = now, step.requests
        if self.draft_size is None:
            return
        same = step.decoding and len(rows) == len(step.requests) and before == step.requests
        drafted = sum(step.counts) - len(step.counts)
        mean = sum(map(len, emitted)) / len(rows)
        self.draft_size.record(len(rows), drafted, mean, seconds if same else None)
        self.draft_size.begin(len(rows))

    def _begin(self, texts: dict[str, list[int]], step: VerifiedStep) -> None:
        """Start drafting for requests; ``texts`` are their tokens read so far."""
        for request in texts:
            if request in self._slots:
                continue
            if not self._unused_slots:  # take the slot of a preempted request
                self._drop(next(known for known in self._slots if known not in step.requests))
            self._slots[request] = self._unused_slots.pop()
        slots = torch.tensor([self._slots[request] for request in texts], device="cpu")
        self.requests.begin(slots, [text[:-1] for text in texts.values()])
        roots = torch.tensor([text[-1] for text in texts.values()], device="cpu")
        self.requests.propose(slots, roots, 1)

    def _forget(self, step: VerifiedStep) -> None:
        """Free the slots of requests that have ended."""
        for request in [known for known in self._slots if not step.lives(known)]:
            self._drop(request)

    def _drop(self, request: str) -> None:
        self._unused_slots.append(self._slots.pop(request))
        self._lengths.pop(request, None)

"""Drafts for the batches of SGLang's scheduler, and what the drafter learns from their steps."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from torch import Tensor

from token_recycling.drafting.base import AnyDrafter
from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.integrations.engines.options import ServingOptions
from token_recycling.integrations.engines.requests import RequestDrafter, same_on_all_ranks
from token_recycling.integrations.engines.step_logits import StepLogits
from token_recycling.integrations.sglang.batches import text_of, untouched
from token_recycling.util.tokens import NO_TOKEN


class BatchDrafting:
    """The drafter, the draft-size policy, and which requests the drafter follows.

    Attributes:
        takes_part: whether the drafter takes part in the step that runs.
    """

    def __init__(
        self,
        options: ServingOptions,
        drafter: AnyDrafter,
        *,
        slots: int,
        width: int,
        device_type: str,
        group: Any,
    ) -> None:
        """Draft for the requests in ``slots`` slots.

        Args:
            options: of the plug-in.
            drafter: shared by all requests.
            slots: of SGLang's pool of requests.
            width: maximum nodes of a draft, root included.
            device_type: of the model.
            group: SGLang's tensor-parallel group, or None.
        """
        self._options, self._width, self._group = options, width, group
        self._requests = RequestDrafter(drafter, slots, width, context=options.context)
        first = group is None or group.rank_in_group == 0
        self._keeper = options.keeper(drafter) if first else None
        # Ranks measure different times, but must verify the same trees.
        alone = group is None or group.world_size == 1
        self._size = options.size(drafter, device_type) if alone else None
        self._paused: set[int] = set()  # slots whose requests have been decoded without drafter
        self._ended, self._last = perf_counter(), list[str]()
        self.takes_part = False

    def draft(self, batch: Any, *, captured: bool, late: bool) -> DraftTree:
        """Draft for a decoding batch: as many nodes for each request as are worth their time.

        Args:
            batch: SGLang's.
            captured: the step runs in a graph, of whole drafts only.
            late: the tokens of the last step are not in the requests yet.
        """
        rows = len(batch.reqs)
        before = batch.spec_info
        tokens = before.accept_tokens.view(rows, -1).long().cpu()
        lengths = before.accept_lens.long().cpu()
        roots = tokens.gather(1, lengths[:, None] - 1)[:, 0]
        slots = batch.req_pool_indices.long().cpu()
        size = None if captured else self._size
        nodes = self._width if captured else self._options.size_for(rows, self._width)
        if size is not None:
            size.begin(rows)
        self.takes_part = nodes > 1 and (size is None or size.pays)
        if not self.takes_part:
            self._paused.update(slots.tolist())
            return root_only(roots)
        emitted = [row[:count] for row, count in zip(tokens.tolist(), lengths.tolist())]
        self._resume(batch, slots, emitted if late else [[] for _ in emitted])
        draft = self._requests.propose(slots, roots, nodes)
        if size is not None and draft.scores is not None:
            nodes = size.choose(draft)
        # A drafter with few candidates may propose fewer nodes; SGLang requires ``nodes``.
        draft = self._requests.drafts(slots).first(nodes)
        draft = same_on_all_ranks(self._group, draft)
        self._requests.replace_drafts(slots, draft)
        return draft

    def _resume(self, batch: Any, slots: Tensor, newest: list[list[int]]) -> None:
        """Give the drafter the texts of requests that it has not followed.

        ``newest`` are tokens of each request that are not in it yet.
        """
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._paused]
        if not rows:
            return
        context = self._options.context
        texts = [(text_of(batch.reqs[row], context) + newest[row])[:-1] for row in rows]
        self._requests.begin(slots[torch.tensor(rows, device="cpu")], texts)
        self._paused.difference_update(slots.tolist())

    def record(self, batch: Any, tokens: int, n: int) -> None:
        """Tell the draft-size policy what a step has cost, if it followed another directly.

        Args:
            batch: SGLang's.
            tokens: that the step emitted.
            n: nodes verified for each request.
        """
        now = perf_counter()
        seconds, before = now - self._ended, self._last
        self._ended, self._last = now, [request.rid for request in batch.reqs]
        if self._size is not None:
            rows = len(self._last)
            timed = before == self._last and self.takes_part is (n > 1)
            self._size.record(rows, rows * (n - 1), tokens / rows, seconds if timed else None)

    def learn(
        self,
        slots: Tensor,
        logits: Tensor,
        result: GenerationBatchResult,
        lengths: Tensor,
        n: int,
    ) -> None:
        """Learn from the target's logits at every node and from the accepted tokens.

        Args:
            slots: int64 [B].
            logits: [B · n, V], before anything changed them.
            result: SGLang's.
            lengths: int64 [B], accepted tokens of each request, the last one included.
            n: nodes verified for each request.
        """
        rows = len(slots)
        tokens = result.next_token_ids.view(rows, n).long().cpu()
        behind = torch.arange(n, device="cpu") >= lengths[:, None]
        step_logits = StepLogits(logits, [n] * rows)
        emitted = tokens.masked_fill(behind, NO_TOKEN)
        self._requests.observe(slots, step_logits, list(range(rows)), step_logits.counts, emitted)
        if self._keeper is not None:
            self._keeper.tick()

    def begin(self, batch: Any, logits: Tensor | None, result: GenerationBatchResult) -> None:
        """Start drafting for the requests whose prompts have been read completely.

        Args:
            batch: SGLang's, which has read prompts.
            logits: [B, V], before anything changed them, or None.
            result: SGLang's.
        """
        self._last = []
        read = [
            row
            for row, request in enumerate(batch.reqs)
            if request.extend_end >= len(request.origin_input_ids) + len(request.output_ids)
        ]
        if not read or not batch.forward_mode.is_extend():
            return
        texts = [text_of(batch.reqs[row], self._options.context) for row in read]
        index = torch.tensor(read, device="cpu")
        slots = batch.req_pool_indices.long().cpu()[index]
        self._paused.difference_update(slots.tolist())
        self._requests.begin(slots, [text[:-1] for text in texts])
        roots = torch.tensor([text[-1] for text in texts], device="cpu")
        self._requests.propose(slots, roots, 1)
        # Sampling has already run; use the logits only if it leaves them unchanged.
        if logits is None or len(logits) != len(batch.reqs) or not untouched(batch):
            return
        emitted = result.next_token_ids.long().cpu()[index][:, None]
        step_logits = StepLogits(logits, [1] * len(logits))
        self._requests.observe(slots, step_logits, read, [1] * len(read), emitted)

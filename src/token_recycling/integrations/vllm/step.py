"""What the drafter needs to know of a step that vLLM has verified."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

PLACEHOLDER = -1  # what vLLM fills up requests with that enter a batch of decoding ones


def drafted(runner: Any, metadata: Any) -> list[int]:
    """Return the rows of the batch that verify drafts of ours that are still known."""
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
    """The logits of a batch, a row for every root and every draft below it.

    Attributes:
        requests: names, by row of the batch.
        counts: per row how many rows of logits it has.
        nodes: per row how many of them are nodes of a draft of ours, the root included.
        logits: [sum of counts, V], row after row.
    """

    def __init__(self, runner: Any, logits: Tensor, metadata: Any) -> None:
        """Take what ``runner`` computed; before a grammar or a penalty changes ``logits``."""
        self._runner = runner
        self.requests: list[str] = list(runner.input_batch.req_ids)
        self.counts: list[int] = [drafts + 1 for drafts in metadata.num_draft_tokens]
        self.nodes = [1] * len(self.counts)
        for row in drafted(runner, metadata):
            self.nodes[row] = self.counts[row]
        self.logits = logits

    @cached_property
    def starts(self) -> list[int]:
        """Where each row's logits begin."""
        starts = [0]
        for count in self.counts:
            starts.append(starts[-1] + count)
        return starts[:-1]

    def answers(self, rows: list[int]) -> Tensor:
        """Return the logits [B, n, V] of some rows; behind a row's last node it is repeated."""
        n = max(self.counts[row] for row in rows)
        if len(rows) == len(self.counts) and min(self.counts) == n:
            return self.logits.view(len(rows), n, -1)
        index = [[self.starts[r] + min(i, self.counts[r] - 1) for i in range(n)] for r in rows]
        return self.logits[torch.tensor(index, device=self.logits.device)]

    def lives(self, request: str) -> bool:
        """True until a request has ended."""
        return request in self._runner.requests

    def structured(self, row: int) -> bool:
        """True when a grammar checks the row's drafts, which it can do along a chain only."""
        params = self._params(row)
        return params is not None and params.structured_outputs is not None

    def sampled(self, row: int) -> bool:
        """True when the row's tokens are drawn, not the likeliest."""
        params = self._params(row)
        return params is not None and params.temperature > 0

    def _params(self, row: int) -> Any:
        return self._runner.requests[self.requests[row]].sampling_params

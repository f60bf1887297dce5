"""The interface between the decoding loop and a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from token_recycling.drafting.draft import DraftTree
from token_recycling.model.lm_head import Float32Head, StockHead

# tokens [B, c] of a chunk of the prompts -> bool [B, c], which to learn from, or None for none
PromptMask = Callable[[Tensor], Tensor | None]
# (tokens [B, w], logits [B, w, V], mask [B, w]) of the columns to learn from
LearnPrompt = Callable[[Tensor, Tensor, Tensor], None]
# (prompt tokens read, total prompt tokens)
OnProgress = Callable[[int, int], None]
PROMPT_COST = 0.05  # for logits to learn from, as a fraction of the cost of reading a prompt


class Target(Protocol):
    """A model that reads prompts, verifies drafts and keeps the KV cache of both."""

    model: Any
    device: torch.device
    vocab_size: int
    max_context: int | None
    batch_invariant: bool
    adoptions: int  # how often it took the model as it was then (see ``TreeTarget.adopt``)

    @property
    def is_warm(self) -> bool:
        """False if the last ``verify`` took longer than later ones of its size will."""

    @property
    def lm_head(self) -> Float32Head | StockHead:
        """The context in which forwards compute their logits."""

    inference_context: Callable[[], AbstractContextManager[Any]]

    def prefill(
        self,
        prompts: list[list[int]],
        *,
        prompt_mask: PromptMask | None = None,
        learn_prompt: LearnPrompt | None = None,
        whole_prompts: bool = False,
        on_progress: OnProgress | None = None,
        cached: int = 0,
    ) -> Tensor:
        """Read the prompts and return the logits [B, V] after the last token of each.

        Args:
            prompts: B lists of tokens.
            prompt_mask: selects the prompt tokens to learn from; None: all.
            learn_prompt: gets their logits, chunk by chunk; None: they are not computed.
            whole_prompts: use all tokens that ``prompt_mask`` selects; False: of those in a chunk
                only the last, as many as ``PROMPT_COST`` allows.
            on_progress: called after every chunk.
            cached: for a single row, how many of its first tokens are already in the cache.

        Raises:
            TokenRecyclingError: a prompt is empty, or leaves no room in the context.
        """

    def deepest(self) -> list[int] | None:
        """Return the depth of each row's deepest node to verify next; None: any."""

    def verify(self, draft: DraftTree) -> Tensor:
        """Return the logits [B, n, V] of every node in one forward."""

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Commit the last draft's nodes ``path[b, :counts[b]]`` (``path``: int64 [B, p])."""

    def clear_drafts(self) -> None:
        """Overwrite uncommitted cache entries, so that they cannot affect a later forward."""

    def reset(self) -> None:
        """Drop the context and free its memory."""

"""Prompt lookup: what followed the last occurrence of the latest n-gram in this context."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters.base import Drafter
from token_recycling.drafters.context import Context
from token_recycling.tree import DraftTree, TreeShape, TreeTemplate


class PromptLookupDrafter(Drafter):
    """A chain copied from the context (Saxena 2023), longest n-gram first, latest match first."""

    name = "prompt-lookup"

    def __init__(
        self, *, length: int = 10, max_ngram: int = 3, device: torch.device | str = "cpu"
    ) -> None:
        """Propose up to ``length`` tokens after a match of ``max_ngram`` … 1 tokens."""
        self.length, self.max_ngram, self.device = length, max_ngram, device
        self.shape = TreeShape(TreeTemplate.chain(length), device)

    @property
    def shares(self) -> tuple[float, ...]:
        """A guess: half of the steps match, and four of five tokens go on being right."""
        return tuple(0.5 * 0.8**depth for depth in range(self.length))

    def start(self, prompts: list[list[int]]) -> None:
        """Take the prompts as the first context."""
        self.context = Context(prompts, self.max_ngram, self.device)

    def rest(self, roots: Tensor) -> DraftTree:
        """Take the roots into the context."""
        self.context.append(roots[:, None], torch.ones_like(roots))
        return super().rest(roots)

    def propose(self, roots: Tensor) -> DraftTree:
        """Copy what followed the best match; an empty chain where nothing matches."""
        self.context.append(roots[:, None], torch.ones_like(roots))
        found = self.context.continuation(self.length)
        tokens = torch.cat([roots[:, None], found.tokens], dim=1)
        valid = torch.cat([torch.ones_like(found.valid[:, :1]), found.valid], dim=1)
        return self.shape.draft(tokens, valid)

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Append the accepted tokens; the bonus token comes back as the next root."""
        self.context.follow(accepted)

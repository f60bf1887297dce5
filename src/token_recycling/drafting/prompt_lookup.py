"""Prompt lookup: drafts copied from an earlier occurrence of the last n-gram in the context."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import Drafter
from token_recycling.drafting.candidates import Candidates
from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.drafting.kernels.host.context import copy_chains
from token_recycling.drafting.ngram import Context
from token_recycling.drafting.templates import TreeShape, TreeTemplate

LOOKUP_TOKENS = 10  # copied after a match, as Spec-Bench does


class PromptLookupDrafter(Drafter[Context]):
    """Copies the tokens after the longest n-gram match, latest first on a tie (Saxena 2023)."""

    name = "prompt-lookup"

    def __init__(self, *, length: int = LOOKUP_TOKENS, max_ngram: int = 3) -> None:
        """Propose up to ``length`` tokens after a match of 1 to ``max_ngram`` tokens."""
        self.length, self.max_ngram = length, max_ngram
        self.shape = TreeShape(TreeTemplate.chain(length), "cpu")

    @property
    def acceptance(self) -> tuple[float, ...]:
        """A guess: half of the steps have a match, and each token of it is right with p = 0.8."""
        return tuple(0.5 * 0.8**depth for depth in range(self.length))

    def new_state(self, batch: int, capacity: int | None = None) -> Context:
        """Return empty contexts."""
        return Context.empty(batch, capacity, self.length + 2)

    def load(self, state: Context, texts: list[list[int]]) -> None:
        """Load the texts as context."""
        state.load(texts)

    def propose(self, state: Context, roots: Tensor, size: int | None = None) -> DraftTree:
        """Copy the tokens after the best match; rows without a match get only a root."""
        state.append_roots(roots)
        if size == 1:
            return root_only(roots)
        tokens = torch.empty((len(roots), self.length + 1), dtype=torch.long, device="cpu")
        valid = torch.empty_like(tokens, dtype=torch.bool)
        copy_chains(
            state.tokens.numpy(),
            state.lengths.numpy(),
            self.max_ngram,
            tokens.numpy(),
            valid.numpy(),
        )
        return self.shape.draft(tokens, valid).first(size)

    def observe(
        self, state: Context, draft: DraftTree, candidates: Candidates, accepted: Accepted
    ) -> None:
        """Append the accepted tokens."""
        state.append_accepted(accepted)

"""Prompt lookup: what followed the last occurrence of the latest n-gram in this context."""

from __future__ import annotations

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters.base import Drafter
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
        # Room to the right: matches look ``length`` tokens ahead, past the end of the context.
        # A hole in front, equal to no token, keeps n-grams from reaching before the start.
        width = max(map(len, prompts)) + self.max_ngram
        self.context = torch.full((len(prompts), width), -1, device=self.device)
        for row, prompt in enumerate(prompts):
            begin = self.max_ngram
            self.context[row, begin : begin + len(prompt)] = torch.tensor(prompt)
        self.lengths = torch.tensor(
            [self.max_ngram + len(prompt) for prompt in prompts], device=self.device
        )

    def _append(self, tokens: Tensor, counts: Tensor) -> None:
        """Append the first ``counts`` [B] of ``tokens`` [B, t] to each row's context."""
        batch, t = tokens.shape
        needed = int(self.lengths.max()) + t
        if needed > self.context.shape[1]:
            room = self.context.new_full((batch, max(needed, 2 * self.context.shape[1])), -1)
            room[:, : self.context.shape[1]] = self.context
            self.context = room
        slots = self.lengths[:, None] + torch.arange(t, device=self.device)
        kept = torch.arange(t, device=self.device) < counts[:, None]
        self.context.scatter_(1, slots, torch.where(kept, tokens, -1))
        self.lengths = self.lengths + counts

    def propose(self, roots: Tensor) -> DraftTree:
        """Copy what followed the best match; an empty chain where nothing matches."""
        self._append(roots[:, None], torch.ones_like(self.lengths))
        width = self.context.shape[1]
        places = torch.arange(width, device=self.device)
        # agree[b, i]: how many tokens ending at slot i equal the last ones of the context
        agree = torch.zeros_like(self.context)
        running = torch.ones_like(self.context, dtype=torch.bool)
        for back in range(self.max_ngram):
            tail = self.context.gather(1, (self.lengths - 1 - back)[:, None])
            running &= (self.context.roll(back, dims=1) == tail) & (tail >= 0)
            agree += running
        # only earlier places count, and only slots whose n-gram lies within the buffer
        earlier = (places < self.lengths[:, None] - 1) & (places >= self.max_ngram)
        score = torch.where(earlier, agree, 0) * width + places
        best = score.argmax(dim=1)
        found = torch.where(earlier, agree, 0).gather(1, best[:, None]) > 0
        ahead = best[:, None] + 1 + torch.arange(self.length, device=self.device)
        copied = self.context.gather(1, ahead.clamp(max=width - 1))
        inside = found & (ahead < self.lengths[:, None])
        tokens = torch.cat([roots[:, None], torch.where(inside, copied, 0)], dim=1)
        valid = torch.cat([torch.ones_like(roots[:, None], dtype=torch.bool), inside], dim=1)
        return self.shape.draft(tokens, valid)

    def observe(self, draft: DraftTree, logits: Tensor, accepted: Accepted) -> None:
        """Append the accepted tokens; the bonus token comes back as the next root."""
        kept = [tokens[:-1] for tokens in accepted.tokens]
        emitted = torch.zeros_like(draft.tokens)
        for row, tokens in enumerate(kept):
            emitted[row, : len(tokens)] = torch.tensor(tokens)
        self._append(emitted, torch.tensor([len(tokens) for tokens in kept], device=self.device))

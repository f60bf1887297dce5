"""The tokens of each row so far, and what followed their last n-gram before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HOLE = -1  # in front of a row and behind it; equal to no token
ROOM = 256  # slots by which the buffer grows at least


@dataclass(frozen=True)
class Continuation:
    """What followed an earlier occurrence of the last tokens of each row.

    Attributes:
        tokens: int64 [B, length]; 0 where there is none.
        valid: bool [B, length]; once False, False to the end.
        run: int64 [B], how many tokens agreed before it; 0 where there was no match.
    """

    tokens: Tensor
    valid: Tensor
    run: Tensor


class Context:
    """``tokens`` int64 [B, width] behind ``window`` holes, and ``lengths`` int64 [B] with them."""

    def __init__(
        self, prompts: list[list[int]], window: int, device: torch.device | str = "cpu"
    ) -> None:
        """Begin with ``prompts``; n-grams of up to ``window`` tokens are compared."""
        self.window = window
        longest = max(map(len, prompts))
        rows = [
            [HOLE] * window + prompt + [HOLE] * (longest - len(prompt) + ROOM) for prompt in prompts
        ]
        self.tokens = torch.tensor(rows, device=device)
        self.lengths = torch.tensor([window + len(prompt) for prompt in prompts], device=device)
        # An n-gram's agreement as a number of ``window`` bits, the last token's the highest; its
        # leading ones are the length of the run.
        self._weights = 2.0 ** torch.arange(window, device=device)
        codes = torch.arange(2**window, device=device)
        breaks = (2**window - 1 - codes).clamp(min=0.5).log2().floor().long()
        self._runs = window - 1 - breaks

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Append the first ``counts`` [B] of ``tokens`` [B, t] to each row."""
        batch, t = tokens.shape
        needed = int(self.lengths.max()) + t
        if needed > self.tokens.shape[1]:
            room = self.tokens.new_full((batch, max(needed, self.tokens.shape[1] + ROOM) * 2), HOLE)
            room[:, : self.tokens.shape[1]] = self.tokens
            self.tokens = room
        places = torch.arange(t, device=self.tokens.device)
        kept = torch.where(places < counts[:, None], tokens, HOLE)
        self.tokens.scatter_(1, self.lengths[:, None] + places, kept)
        self.lengths = self.lengths + counts

    def last(self, count: int) -> Tensor:
        """Return the last ``count`` tokens of each row, int64 [B, count]."""
        places = torch.arange(-count, 0, device=self.tokens.device)
        return self.tokens.gather(1, self.lengths[:, None] + places)

    def continuation(self, length: int, least: int = 1) -> Continuation:
        """Find the longest run that agrees with the last tokens, the latest of equals.

        Args:
            length: tokens to return.
            least: a shorter run is no match.
        """
        used = min(int(self.lengths.max()), self.tokens.shape[1])
        tail = self.last(self.window)
        tail = tail.masked_fill(tail == HOLE, HOLE - 1)
        grams = self.tokens[:, :used].unfold(1, self.window, 1)
        agree = (grams == tail[:, None]).float() @ self._weights
        ends = torch.arange(self.window, used + 1, device=tail.device)  # slot behind each n-gram
        runs = self._runs[agree.long()]
        matches = (runs >= least) & (ends < self.lengths[:, None])
        best, place = torch.where(matches, runs * used + ends, 0).max(dim=1)
        run = best // used
        ahead = place[:, None] + self.window + torch.arange(length, device=tail.device)
        valid = (ahead < self.lengths[:, None]) & (run > 0)[:, None]
        copied = self.tokens.gather(1, ahead.clamp(max=self.tokens.shape[1] - 1))
        return Continuation(copied.masked_fill(~valid, 0), valid, run)

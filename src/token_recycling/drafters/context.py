"""The tokens of each row so far, and what followed their last n-gram before."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from token_recycling.accept import HOLE, Accepted

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


def none_of(batch: int, length: int, device: torch.device | str) -> Continuation:
    """Return the continuation of ``batch`` rows without a match."""
    tokens = torch.zeros((batch, length), dtype=torch.long, device=device)
    return Continuation(tokens, tokens.bool(), tokens.new_zeros(batch))


class Context:
    """``tokens`` int64 [B, width] between holes, and ``lengths`` int64 [B] with those in front.

    There are ``window`` holes in front. What is written is written in place.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        window: int,
        device: torch.device | str = "cpu",
        room: int | None = None,
    ) -> None:
        """Begin with ``prompts``; n-grams of up to ``window`` tokens are compared.

        Args:
            prompts: B lists of tokens.
            window: tokens.
            device: to live on.
            room: tokens that a row may come to. Then every shape stays the same, and the host
                reads nothing. None: the buffer grows.
        """
        self.window, self.room = window, room
        width = window + (max(map(len, prompts)) + ROOM if room is None else room)
        self.tokens = torch.empty((len(prompts), width), dtype=torch.long, device=device)
        self.lengths = torch.zeros(len(prompts), dtype=torch.long, device=device)
        # An n-gram's agreement as a number of ``window`` bits, the last token's the highest; its
        # leading ones are the length of the run.
        self._weights = 2.0 ** torch.arange(window, dtype=torch.float32, device=device)
        codes = torch.arange(2**window, device=device)
        breaks = (2**window - 1 - codes).float().clamp(min=0.5).log2().floor().long()
        self._runs = window - 1 - breaks
        self.restart(prompts)

    def restart(self, prompts: list[list[int]]) -> None:
        """Begin with as many other prompts, in the same place."""
        width = self.tokens.shape[1] - self.window
        holes = [HOLE] * self.window
        rows = [holes + prompt + [HOLE] * (width - len(prompt)) for prompt in prompts]
        self.tokens.copy_(torch.tensor(rows, device="cpu"))
        lengths = [self.window + len(prompt) for prompt in prompts]
        self.lengths.copy_(torch.tensor(lengths, device="cpu"))

    def of(self, tokens: Tensor, lengths: Tensor) -> Context:
        """Return a context of other rows, int64 [B, width] and [B], of the same width."""
        other = copy.copy(self)
        other.tokens, other.lengths = tokens, lengths
        return other

    def slid(self, margin: int) -> Context:
        """Return a context where every row has room for ``margin`` tokens more.

        Rows that have not forget their first half. Only where there is ``room``.
        """
        width = self.tokens.shape[1]
        shift = (self.lengths > width - margin) * (width // 2)
        places = torch.arange(width, device=self.tokens.device) + shift[:, None]
        tokens = self.tokens.gather(1, places.clamp(max=width - 1))
        return self.of(tokens.masked_fill(places >= width, HOLE), self.lengths - shift)

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Append the first ``counts`` [B] of ``tokens`` [B, t] to each row."""
        t = tokens.shape[1]
        places = self.lengths[:, None] + torch.arange(t, device=self.tokens.device)
        if self.room is None:
            self._make_room(int(self.lengths.max()) + t)
        else:  # a row that has ended may come here too, and must not write past its end
            places = places.clamp(max=self.tokens.shape[1] - 1)
        kept = torch.where(places < (self.lengths + counts)[:, None], tokens, HOLE)
        self.tokens.scatter_(1, places, kept)
        self.lengths.add_(counts)
        if self.room is not None:
            self.lengths.clamp_(max=self.tokens.shape[1] - 1)

    def follow(self, accepted: Accepted) -> None:
        """Append what a step emitted; its last token comes back as the next root."""
        self.append(accepted.emitted[:, :-1], (accepted.counts - 1).clamp(min=0))

    def _make_room(self, needed: int) -> None:
        width = self.tokens.shape[1]
        if needed > width:
            room = self.tokens.new_full((len(self.tokens), max(needed, width + ROOM) * 2), HOLE)
            room[:, :width] = self.tokens
            self.tokens = room

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
        width = self.tokens.shape[1]
        used = width if self.room is not None else min(int(self.lengths.max()), width)
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

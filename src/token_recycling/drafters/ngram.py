"""The tokens of each row on the drafter's device, and what followed their last n-gram before."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters.base import Rows
from token_recycling.tokens import NO_TOKEN

ROOM = 256  # slots by which the buffer grows at least


@dataclass
class NgramMatch(Rows):
    """What followed an earlier occurrence of the last tokens of each row.

    Attributes:
        tokens: int64 [B, length]; 0 where there is none.
        valid: bool [B, length]; once False, False to the end.
        run: int64 [B], how many tokens agreed before it; 0 where there was no match.
    """

    tokens: Tensor
    valid: Tensor
    run: Tensor

    @classmethod
    def none(cls, batch: int, length: int, device: torch.device | str) -> NgramMatch:
        """Return ``batch`` rows without a match."""
        tokens = torch.zeros((batch, length), dtype=torch.long, device=device)
        return cls(tokens, tokens.bool(), tokens.new_zeros(batch))


@dataclass
class Context(Rows):
    """The tokens of each row, for a search on the device.

    Attributes:
        tokens: int64 [B, width]: ``window`` times ``NO_TOKEN``, the row's tokens, ``NO_TOKEN``.
        lengths: int64 [B], the used slots, those of the window included.
        window: tokens of the longest n-gram that is compared.
        capacity: tokens that a row may come to. Then all shapes stay fixed, everything is written
            in start and nothing is read by the host. None: the buffer grows.
        margin: free slots that a selected row has at least; where ``capacity`` leaves fewer, the
            row forgets its first half.
    """

    tokens: Tensor
    lengths: Tensor
    window: int
    capacity: int | None = None
    margin: int = 0

    @classmethod
    def empty(
        cls,
        batch: int,
        window: int,
        device: torch.device | str,
        capacity: int | None = None,
        margin: int = 0,
    ) -> Context:
        """Return ``batch`` rows without tokens."""
        width = window + (ROOM if capacity is None else capacity)
        tokens = torch.full((batch, width), NO_TOKEN, dtype=torch.long, device=device)
        lengths = torch.full((batch,), window, dtype=torch.long, device=device)
        return cls(tokens, lengths, window, capacity, margin)

    def load(self, texts: list[list[int]]) -> None:
        """Replace all tokens by ``texts``; with a capacity, in the same tensors."""
        if self.capacity is None:
            longest = self.window + max(map(len, texts))
            self.tokens = self.tokens.new_empty(len(texts), longest + ROOM)
        width = self.tokens.shape[1] - self.window
        front = [NO_TOKEN] * self.window
        rows = [front + text + [NO_TOKEN] * (width - len(text)) for text in texts]
        self.tokens.copy_(torch.tensor(rows, device="cpu"))
        lengths = [self.window + len(text) for text in texts]
        self.lengths.copy_(torch.tensor(lengths, device="cpu"))

    def select(self, index: Tensor) -> Context:
        """Return copies of rows, with room for ``margin`` tokens each."""
        rows = super().select(index)
        if self.capacity is None:
            return rows
        width = rows.tokens.shape[1]
        shift = (rows.lengths > width - self.margin) * (width // 2)
        slots = torch.arange(width, device=rows.tokens.device) + shift[:, None]
        tokens = rows.tokens.gather(1, slots.clamp(max=width - 1))
        tokens = tokens.masked_fill(slots >= width, NO_TOKEN)
        return replace(rows, tokens=tokens, lengths=rows.lengths - shift)

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Append the first ``counts`` [B] of ``tokens`` [B, t] to each row."""
        t = tokens.shape[1]
        slots = self.lengths[:, None] + torch.arange(t, device=self.tokens.device)
        if self.capacity is None:
            self._reserve(int(self.lengths.max()) + t)
        else:  # a row that has ended may come here too, and must not write past its end
            slots = slots.clamp(max=self.tokens.shape[1] - 1)
        kept = torch.where(slots < (self.lengths + counts)[:, None], tokens, NO_TOKEN)
        self.tokens.scatter_(1, slots, kept)
        self.lengths.add_(counts)
        if self.capacity is not None:
            self.lengths.clamp_(max=self.tokens.shape[1] - 1)

    def append_roots(self, roots: Tensor) -> None:
        """Append one token, int64 [B], to each row."""
        self.append(roots[:, None], torch.ones_like(roots))

    def append_accepted(self, accepted: Accepted) -> None:
        """Append what a step emitted, except for the last token, which is the next root."""
        self.append(accepted.emitted[:, :-1], (accepted.counts - 1).clamp(min=0))

    def _reserve(self, needed: int) -> None:
        width = self.tokens.shape[1]
        if needed > width:
            grown = self.tokens.new_full(
                (len(self.tokens), max(needed, width + ROOM) * 2), NO_TOKEN
            )
            grown[:, :width] = self.tokens
            self.tokens = grown

    def last(self, count: int) -> Tensor:
        """Return the last ``count`` tokens of each row, int64 [B, count]."""
        slots = torch.arange(-count, 0, device=self.tokens.device)
        return self.tokens.gather(1, self.lengths[:, None] + slots)


class NgramMatcher:
    """Finds what followed an earlier occurrence of a row's last tokens."""

    def __init__(self, window: int, device: torch.device | str) -> None:
        """Compare n-grams of up to ``window`` tokens."""
        self.window = window
        # An n-gram's agreement as a number of ``window`` bits, the last token's the highest; the
        # number of leading ones is the length of the run.
        self._weights = 2.0 ** torch.arange(window, dtype=torch.float32, device=device)
        codes = torch.arange(2**window, device=device)
        breaks = (2**window - 1 - codes).float().clamp(min=0.5).log2().floor().long()
        self._runs = window - 1 - breaks

    def __call__(self, context: Context, length: int, least: int = 1) -> NgramMatch:
        """Find the longest run that agrees with the last tokens, the latest of equals.

        Args:
            context: of B rows with this window.
            length: tokens to return.
            least: a shorter run is no match.
        """
        width = context.tokens.shape[1]
        fixed = context.capacity is not None
        used = width if fixed else min(int(context.lengths.max()), width)
        tail = context.last(self.window)
        tail = tail.masked_fill(tail == NO_TOKEN, NO_TOKEN - 1)  # equal to nothing
        grams = context.tokens[:, :used].unfold(1, self.window, 1)
        agree = (grams == tail[:, None]).float() @ self._weights
        ends = torch.arange(self.window, used + 1, device=tail.device)  # slot behind each n-gram
        runs = self._runs[agree.long()]
        matches = (runs >= least) & (ends < context.lengths[:, None])
        best, start = torch.where(matches, runs * used + ends, 0).max(dim=1)
        run = best // used
        ahead = start[:, None] + self.window + torch.arange(length, device=tail.device)
        valid = (ahead < context.lengths[:, None]) & (run > 0)[:, None]
        copied = context.tokens.gather(1, ahead.clamp(max=width - 1))
        return NgramMatch(copied.masked_fill(~valid, 0), valid, run)

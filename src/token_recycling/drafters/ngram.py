"""The tokens of each row on the drafter's device, and the search for earlier n-grams in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from token_recycling.accept import Accepted
from token_recycling.drafters.base import Rows
from token_recycling.tokens import NO_TOKEN

ROOM = 256  # the buffer grows by at least this many slots


@dataclass
class NgramMatch(Rows):
    """The tokens that followed an earlier occurrence of the last tokens of each row.

    Attributes:
        tokens: int64 [B, length], padded with 0.
        valid: bool [B, length]; the valid tokens come first.
        run: int64 [B], how many of the last tokens matched; 0 where there was no match.
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
    """The tokens of each row, for searching on the device.

    Attributes:
        tokens: int64 [B, width]: ``window`` times ``NO_TOKEN``, then the row's tokens, padded
            with ``NO_TOKEN``.
        lengths: int64 [B], used slots, including those of the window.
        window: length of the longest n-gram that is compared.
        capacity: most tokens of a row. All shapes are then fixed, all writes are in place and the
            host reads nothing. None: the buffer grows.
        margin: minimum of free slots after ``select`` with a ``capacity``; a row with fewer drops
            the first half of its slots.
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
        """Replace all tokens by ``texts``; with a capacity, in place."""
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
        """Return copies of the rows at ``index``, each with at least ``margin`` free slots."""
        rows = super().select(index)
        if self.capacity is None:
            return rows
        width = rows.tokens.shape[1]
        shift = (rows.lengths > width - self.margin) * (width // 2)
        slots = torch.arange(width, device=rows.tokens.device) + shift[:, None]
        tokens = rows.tokens.gather(1, slots.clamp(max=width - 1))
        tokens = tokens.masked_fill(slots >= width, NO_TOKEN)
        return replace(rows, tokens=tokens, lengths=rows.lengths - shift)

    def write(self, index: Tensor, rows: Context | None) -> None:
        """Write ``rows`` to ``index`` (int64 [b], no duplicates); None: rows without tokens."""
        if rows is None:
            device = self.tokens.device
            rows = Context.empty(len(index), self.window, device, self.capacity, self.margin)
        super().write(index, rows)

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Append the first ``counts`` [B] of ``tokens`` [B, t] to each row."""
        t = tokens.shape[1]
        slots = self.lengths[:, None] + torch.arange(t, device=self.tokens.device)
        if self.capacity is None:
            self._reserve(int(self.lengths.max()) + t)
        else:  # rows that have ended are appended to as well and must stay in bounds
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
        """Append the tokens that a step emitted, except for the last, which is the next root."""
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
    """Finds earlier occurrences of each row's last tokens."""

    def __init__(self, window: int, device: torch.device | str) -> None:
        """Compare n-grams of up to ``window`` tokens."""
        self.window = window
        # The agreeing tokens of an n-gram are encoded as an integer of ``window`` bits, the last
        # token in the highest bit. Its number of leading ones is the length of the run.
        self._weights = 2.0 ** torch.arange(window, dtype=torch.float32, device=device)
        codes = torch.arange(2**window, device=device)
        breaks = (2**window - 1 - codes).float().clamp(min=0.5).log2().floor().long()
        self._runs = window - 1 - breaks

    def __call__(self, context: Context, length: int, least: int = 1) -> NgramMatch:
        """Find the longest run that agrees with the last tokens; on a tie, the latest one.

        Args:
            context: B rows with this window.
            length: number of tokens to return.
            least: length of the shortest run that counts as a match.
        """
        width = context.tokens.shape[1]
        fixed = context.capacity is not None
        used = width if fixed else min(int(context.lengths.max()), width)
        tail = context.last(self.window)
        tail = tail.masked_fill(tail == NO_TOKEN, NO_TOKEN - 1)  # matches no token
        grams = context.tokens[:, :used].unfold(1, self.window, 1)
        agree = (grams == tail[:, None]).float() @ self._weights
        ends = torch.arange(self.window, used + 1, device=tail.device)  # slot after each n-gram
        runs = self._runs[agree.long()]
        matches = (runs >= least) & (ends < context.lengths[:, None])
        best, start = torch.where(matches, runs * used + ends, 0).max(dim=1)
        run = best // used
        ahead = start[:, None] + self.window + torch.arange(length, device=tail.device)
        valid = (ahead < context.lengths[:, None]) & (run > 0)[:, None]
        copied = context.tokens.gather(1, ahead.clamp(max=width - 1))
        return NgramMatch(copied.masked_fill(~valid, 0), valid, run)

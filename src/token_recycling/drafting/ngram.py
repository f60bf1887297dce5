"""The tokens of each row, and the chain that followed an earlier occurrence of the last ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skinny_kernels.compiled import as_array
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.base import DrafterState
from token_recycling.drafting.kernels.host.context import append_roots, extend_contexts
from token_recycling.util.tokens import NO_TOKEN

ROOM = 256  # the buffer grows by at least this many slots


@dataclass
class Chains(DrafterState):
    """The tokens that followed an earlier occurrence of the last tokens of each row.

    Attributes:
        tokens: int64 [B, length].
        counts: int64 [B], valid tokens per row; -1 where none were searched for.
        runs: int64 [B], how many of the last tokens matched; 0 where there was no match.
    """

    tokens: Tensor
    counts: Tensor
    runs: Tensor

    @classmethod
    def none(cls, batch: int, length: int) -> Chains:
        """Return ``batch`` rows for which no match was searched."""
        tokens = torch.zeros((batch, length), dtype=torch.long, device="cpu")
        return cls(tokens, tokens.new_full((batch,), -1), tokens.new_zeros(batch))

    def clear(self) -> None:
        """Mark all rows as not searched for."""
        self.counts.fill_(-1)


@dataclass
class Context(DrafterState):
    """The tokens of each row, on the host.

    Attributes:
        tokens: int64 [B, width], padded with ``NO_TOKEN``.
        lengths: int64 [B], tokens per row.
        capacity: most tokens of a row; the buffer then never grows. None: it grows.
        margin: minimum of free slots after ``make_room`` with a ``capacity``; a row with fewer
            drops the first half of its slots.
    """

    tokens: Tensor
    lengths: Tensor
    capacity: int | None = None
    margin: int = 0

    @classmethod
    def empty(cls, batch: int, capacity: int | None = None, margin: int = 0) -> Context:
        """Return ``batch`` rows without tokens."""
        width = ROOM if capacity is None else capacity
        tokens = torch.full((batch, width), NO_TOKEN, dtype=torch.long, device="cpu")
        return cls(tokens, tokens.new_zeros(batch), capacity, margin)

    def load(self, texts: list[list[int]]) -> None:
        """Replace all tokens by ``texts``; with a capacity, keep the last ones that fit."""
        if self.capacity is None:
            width = max(map(len, texts)) + ROOM
            self.tokens = self.tokens.new_full((len(texts), width), NO_TOKEN)
        limit = self.tokens.shape[1] - self.margin
        for row, text in enumerate(texts):
            tail = text[-limit:]
            self.tokens[row] = NO_TOKEN
            self.tokens[row, : len(tail)] = torch.tensor(tail, dtype=torch.long, device="cpu")
            self.lengths[row] = len(tail)

    def make_room(self) -> None:
        """Drop the older half of rows with fewer than ``margin`` free slots."""
        width = self.tokens.shape[1]
        if self.capacity is None or int(self.lengths.numpy().max()) <= width - self.margin:
            return
        shift = (self.lengths > width - self.margin) * (width // 2)
        slots = torch.arange(width, device="cpu") + shift[:, None]
        tokens = self.tokens.gather(1, slots.clamp(max=width - 1))
        self.tokens = tokens.masked_fill(slots >= width, NO_TOKEN)
        self.lengths = self.lengths - shift

    def reserve(self, more: int) -> None:
        """Make room for ``more`` tokens per row; without a capacity the buffer may be replaced."""
        if self.capacity is not None:
            return
        width = self.tokens.shape[1]
        needed = int(self.lengths.numpy().max()) + more
        if needed > width:
            grown = self.tokens.new_full((len(self.tokens), max(needed, 2 * width)), NO_TOKEN)
            grown[:, :width] = self.tokens
            self.tokens = grown

    def append_roots(self, roots: Tensor) -> None:
        """Append one token, int64 [B], to each row; in a full row it replaces the last one."""
        self.reserve(1)
        append_roots(self.tokens.numpy(), self.lengths.numpy(), as_array(roots))

    def append_accepted(self, accepted: Accepted) -> None:
        """Append the tokens that a step emitted, except for the last, which is the next root."""
        self.reserve(accepted.emitted.shape[1])
        extend_contexts(self.tokens.numpy(), self.lengths.numpy(), as_array(accepted.emitted))

"""What a step accepts of its draft."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from token_recycling.util.tokens import NO_TOKEN


@dataclass(frozen=True)
class Accepted:
    """What a step emits, as tensors on the device and as lists on the host.

    The lists are empty inside a graph, whose results the host has not read yet, and in engines.

    Attributes:
        path: int64 [B, p]; ``path[b, :counts[b]]`` are the accepted nodes, the root first.
        emitted: int64 [B, p], the token that the target chose after each of these nodes, the
            bonus token last; padded with ``NO_TOKEN``.
        counts: int64 [B], emitted tokens per row; 0 for a row that had ended before. For a row
            that ends in this step it may exceed the length of ``tokens``.
        tokens: per row, the emitted tokens up to where the row ends.
        reasons: per row, why it ended in this step, or None.
        drafted: per row, the number of valid nodes below the root.
    """

    path: Tensor
    emitted: Tensor
    counts: Tensor
    tokens: list[list[int]] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)

    def select(self, rows: list[int]) -> Accepted:
        """Return what these rows accepted."""
        return Accepted(
            self.path[rows],
            self.emitted[rows],
            self.counts[rows],
            [self.tokens[row] for row in rows],
            [self.reasons[row] for row in rows],
            [self.drafted[row] for row in rows],
        )


def joined(parts: list[Accepted]) -> Accepted:
    """Return what the rows of several batches accepted, one after another."""
    longest = max(part.path.shape[1] for part in parts)

    def column(tensors: list[Tensor], fill: int) -> Tensor:
        return torch.cat(
            [pad(tensor, (0, longest - tensor.shape[1]), value=fill) for tensor in tensors]
        )

    return Accepted(
        column([part.path for part in parts], 0),
        column([part.emitted for part in parts], NO_TOKEN),
        torch.cat([part.counts for part in parts]),
        [tokens for part in parts for tokens in part.tokens],
        [reason for part in parts for reason in part.reasons],
        [count for part in parts for count in part.drafted],
    )

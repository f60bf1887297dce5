"""What a step accepts of its draft."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Accepted:
    """The accepted nodes of each row and the tokens that they emit, on the device of the draft.

    Attributes:
        path: int64 [B, p]; ``path[b, :counts[b]]`` are the accepted nodes, the root first.
        emitted: int64 [B, p], the token that the target chose after each of these nodes, the
            bonus token last; padded with ``NO_TOKEN``.
        counts: int64 [B], emitted tokens per row; 0 for a row that had ended before. Inside a
            graph, which does not know the stop rules, a row that ends in this step may count
            tokens after its end.
    """

    path: Tensor
    emitted: Tensor
    counts: Tensor

    def tokens(self, row: int) -> list[int]:
        """Return the emitted tokens of a row; waits for the device."""
        tokens: list[int] = self.emitted[row, : self.counts[row]].tolist()
        return tokens

    def select(self, rows: list[int]) -> Accepted:
        """Return what these rows accepted."""
        return Accepted(self.path[rows], self.emitted[rows], self.counts[rows])

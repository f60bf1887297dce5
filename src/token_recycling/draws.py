"""How a sampled token is drawn, so that it is the one that plain sampling draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Draw(Protocol):
    """Draws a row's next token."""

    def __call__(self, row: int, scores: Tensor) -> Tensor:
        """Return a token, int64 [1], drawn by ``scores`` float32 [1, V]."""


class RowDraws:
    """Every row draws as a single prompt would, with a generator of its own."""

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        """Draw row b with ``generators[b]``; None is PyTorch's own."""
        self.generators = generators

    def __call__(self, row: int, scores: Tensor) -> Tensor:
        """Draw from ``row``'s generator."""
        weights = scores.softmax(dim=-1)
        return torch.multinomial(weights, 1, generator=self.generators[row])[:, 0]


class BatchDraws:
    """Rows draw as one ``torch.multinomial`` over the batch would, though they run apart.

    ``multinomial`` of one sample divides the weights by a block of exponential random numbers
    [B, V] and takes the argmax (the exponential race). Token t of every row belongs to block t,
    so a block is drawn when the first row gets there and kept until the last one has.
    """

    def __init__(self, batch: int) -> None:
        """Draw for ``batch`` rows from PyTorch's own random state."""
        self._drawn = [0] * batch
        self._blocks: deque[Tensor] = deque()
        self._first = 0  # index of the oldest block kept

    def __call__(self, row: int, scores: Tensor) -> Tensor:
        """Draw ``row``'s next token.

        Raises:
            RuntimeError: the scores are no distribution; what multinomial says.
        """
        weights = scores.softmax(dim=-1)
        if not bool((weights >= 0).all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        index = self._drawn[row] - self._first
        if index == len(self._blocks):
            shape = (len(self._drawn), weights.shape[-1])
            self._blocks.append(weights.new_empty(shape).exponential_())
        token = (weights / self._blocks[index][row]).argmax(dim=-1)
        self._drawn[row] += 1
        while self._first < min(self._drawn):
            self._blocks.popleft()
            self._first += 1
        return token

"""How a sampled token is drawn, so that it is the one that plain sampling draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Sampler(Protocol):
    """Draws a row's next token."""

    def __call__(self, row: int, scores: Tensor) -> Tensor:
        """Return a token, int64 [1], drawn by ``scores`` float32 [1, V]."""


class RowSampler:
    """Every row draws as a single prompt would, with a generator of its own."""

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        """Draw row b with ``generators[b]``; None is PyTorch's own."""
        self.generators = generators

    def __call__(self, row: int, scores: Tensor) -> Tensor:
        """Draw from ``row``'s generator."""
        weights = scores.softmax(dim=-1)
        return torch.multinomial(weights, 1, generator=self.generators[row])[:, 0]


class BatchSampler:
    """Rows draw as one ``torch.multinomial`` over the batch would, though they run apart.

    ``multinomial`` of one sample divides the weights by a block of exponential random numbers
    [B, V] and takes the argmax (the exponential race). Token t of every row belongs to block t,
    so a block is drawn when the first row gets there and kept until the last one has.
    """

    def __init__(self, batch: int, *, ahead: bool = False) -> None:
        """Draw for ``batch`` rows from PyTorch's own random state.

        Args:
            batch: rows.
            ahead: some rows may draw tokens that are dropped in the end (see ``rewind``).
        """
        self._drawn = [0] * batch
        self._states: list[Tensor] | None = [] if ahead else None  # before each block
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
            if self._states is not None:
                self._states.append(_random(weights.device).get_rng_state())
            self._blocks.append(weights.new_empty(shape).exponential_())
        token = (weights / self._blocks[index][row]).argmax(dim=-1)
        self._drawn[row] += 1
        while self._first < min(self._drawn):
            self._blocks.popleft()
            self._first += 1
        return token

    def rewind(self, count: int, device: torch.device) -> None:
        """Bring the random state to where plain sampling of ``count`` tokens a row has it."""
        if self._states is not None and count < len(self._states):
            _random(device).set_rng_state(self._states[count])


def _random(device: torch.device) -> Any:
    """The module that keeps the random state of a kind of device."""
    return torch.random if device.type == "cpu" else getattr(torch, device.type)


class NodeSampler:
    """Draws for every node of a draft at once, each by the random numbers of its place.

    The block of exponential numbers that ``torch.multinomial`` would divide the weights of token
    t by (see ``BatchSampler``) is drawn before the step, into a ring of the coming tokens. A node
    of depth d in a step after t tokens is drawn by block t + d. So the longest path of these
    choices is the text that plain sampling gives.
    """

    def __init__(
        self,
        processors: Sequence[Callable[[Any, Tensor], Tensor]],
        ahead: int,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        """Keep ``ahead`` blocks for every row.

        Args:
            processors: per row, from logits float32 [n, V] to scores; each row by itself.
            ahead: blocks.
            vocab_size: V.
            device: of the logits.
        """
        self.processors = list(processors)
        shape = (len(self.processors), ahead, vocab_size)
        self.blocks = torch.ones(shape, dtype=torch.float32, device=device)
        self.chosen = torch.zeros(len(self.processors), dtype=torch.long, device=device)

    def begin(self, generators: Sequence[torch.Generator]) -> None:
        """Draw from these generators, one a row, from their states now."""
        self._generators = list(generators)
        self._states = [generator.get_state() for generator in self._generators]
        self._drawn = [0] * len(self._generators)
        self.chosen.zero_()

    def draw(self, row: int, count: int) -> None:
        """Have the first ``count`` blocks of ``row`` drawn; the oldest of the ring are lost."""
        ring = self.blocks.shape[1]
        while self._drawn[row] < count:
            block = self.blocks[row, self._drawn[row] % ring]
            block.exponential_(generator=self._generators[row])
            self._drawn[row] += 1

    def rewind(self, row: int, count: int) -> None:
        """Bring the generator of ``row`` to where plain sampling of ``count`` tokens has it."""
        self._generators[row].set_state(self._states[row])
        for _ in range(count):
            self.blocks[row, 0].exponential_(generator=self._generators[row])

    def __call__(self, depths: Tensor, logits: Tensor) -> Tensor:
        """Choose a token after every node, int64 [B, n].

        Args:
            depths: int64 [B, n].
            logits: [B, n, V].
        """
        indices = (self.chosen[:, None] + depths) % self.blocks.shape[1]
        chosen = []
        for row, processors in enumerate(self.processors):
            weights = processors(None, logits[row].float()).softmax(dim=-1)
            chosen.append((weights / self.blocks[row, indices[row]]).argmax(dim=-1))
        return torch.stack(chosen)

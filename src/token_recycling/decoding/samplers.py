"""Samplers that draw the same tokens as plain sampling."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

MANY = 256  # best tokens among which the k best and those tied with them are searched
# Processors that depend on a node's logits only, not on the preceding tokens.
NODE_WISE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


def are_node_wise(processors: Any) -> bool:
    """Return True if all ``processors`` of a row depend on a node's logits only."""
    listed = isinstance(processors, list)
    return listed and all(type(one) in NODE_WISE for one in processors)


class Sampler(Protocol):
    """Draws the next token of a row."""

    def __call__(self, row: int, scores: Tensor) -> Tensor:
        """Draw a token, int64 [1], from ``scores`` (logits) float32 [1, V]."""


class RowSampler:
    """Draws for each row as for a single prompt, with a generator per row."""

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        """Draw for row b with ``generators[b]``; None: PyTorch's global one."""
        self.generators = generators

    def __call__(self, row: int, scores: Tensor) -> Tensor:
        """Draw with the generator of ``row``."""
        weights = scores.softmax(dim=-1)
        return torch.multinomial(weights, 1, generator=self.generators[row])[:, 0]


class BatchSampler:
    """Draws like ``torch.multinomial`` over the whole batch, though rows advance independently.

    ``multinomial`` of one sample divides the weights by a block of exponential random numbers
    [B, V] and takes the argmax (the exponential race). Token t of every row uses block t, so a
    block is drawn when the first row needs it and kept until the last row has used it.
    """

    def __init__(self, batch: int, *, ahead: bool = False) -> None:
        """Draw for ``batch`` rows from PyTorch's global random state.

        Args:
            batch: B.
            ahead: rows may draw tokens that are discarded later; keep states for ``rewind``.
        """
        self._drawn = [0] * batch
        self._states: list[Tensor] | None = [] if ahead else None  # before each block
        self._blocks: deque[Tensor] = deque()
        self._first = 0  # index of the oldest block kept

    def __call__(self, row: int, scores: Tensor) -> Tensor:
        """Draw the next token of ``row``.

        Raises:
            RuntimeError: the scores give no distribution, with the message of ``multinomial``.
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
        """Set the random state to that after plain sampling of ``count`` tokens per row."""
        if self._states is not None and count < len(self._states):
            _random(device).set_rng_state(self._states[count])


def _random(device: torch.device) -> Any:
    """Return the torch module that keeps the random state of a device type."""
    return torch.random if device.type == "cpu" else getattr(torch, device.type)


class NodeSampler:
    """Draws a token after every node of a draft at once, by the node's position in the text.

    The exponential random numbers by which ``torch.multinomial`` would divide the weights of token
    t (block t, see ``BatchSampler``) are drawn before the step into a ring buffer. In a step after
    t tokens, a node of depth d uses block t + d. The longest path along these choices is therefore
    the text of plain sampling.

    Processors after a top-k see only the best tokens, since top-p sorts what it sees.
    """

    def __init__(
        self,
        processors: Sequence[Any],
        ahead: int,
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        """Allocate a ring of ``ahead`` blocks per row.

        Args:
            processors: a ``LogitsProcessorList`` per row, of node-wise ones.
            ahead: blocks in the ring.
            vocab_size: V.
            device: that of the logits.
        """
        self.processors = [list(row) for row in processors]
        shape = (len(self.processors), ahead, vocab_size)
        self.blocks = torch.ones(shape, dtype=torch.float32, device=device)
        self.chosen = torch.zeros(len(self.processors), dtype=torch.long, device=device)
        self._generators: list[torch.Generator] = []
        self._states: list[Tensor] = []  # of the generators, before the first draw
        self._drawn: list[int] = []  # blocks, per row

    def begin(self, generators: Sequence[torch.Generator]) -> None:
        """Start drawing with these generators, one per row, from their current states."""
        self._generators = list(generators)
        self._states = [generator.get_state() for generator in self._generators]
        self._drawn = [0] * len(self._generators)
        self.chosen.zero_()

    def draw(self, row: int, count: int) -> None:
        """Draw the first ``count`` blocks of ``row``; new ones overwrite the oldest in the ring."""
        ring = self.blocks.shape[1]
        while self._drawn[row] < count:
            block = self.blocks[row, self._drawn[row] % ring]
            block.exponential_(generator=self._generators[row])
            self._drawn[row] += 1

    def rewind(self, row: int, count: int) -> None:
        """Set the generator of ``row`` to its state after plain sampling of ``count`` tokens."""
        self._generators[row].set_state(self._states[row])
        for _ in range(count):
            self.blocks[row, 0].exponential_(generator=self._generators[row])

    def __call__(self, depths: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose a token after every node.

        Args:
            depths: int64 [B, n].
            logits: [B, n, V].

        Returns:
            The tokens int64 [B, n], and whether any is wrong, bool []: more tokens were tied with
            the last of the k best than ``MANY`` allows for.
        """
        indices = (self.chosen[:, None] + depths) % self.blocks.shape[1]
        rows = [
            _choose(logits[row].float(), processors, self.blocks[row], indices[row])
            for row, processors in enumerate(self.processors)
        ]
        tokens, wrong = zip(*rows)
        return torch.stack(tokens), torch.stack(wrong).any()


def _choose(
    scores: Tensor, processors: list[Any], blocks: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose a token after every node of a row (see ``NodeSampler``)."""
    tokens = None
    wrong = torch.zeros((), dtype=torch.bool, device=scores.device)
    for one in processors:
        if type(one) is TopKLogitsWarper and (many := max(MANY, 2 * one.top_k)) < scores.shape[-1]:
            scores, tokens = scores.topk(many)
            last = scores[:, -1]
            wrong = ((last == scores[:, one.top_k - 1]) & (last > -torch.inf)).any()
            tokens, order = tokens.sort(dim=-1)  # in this order top-p removes tied tokens
            scores = scores.gather(1, order)
        scores = one(None, scores)
    random = blocks[indices] if tokens is None else blocks[indices[:, None], tokens]
    best = (scores.softmax(dim=-1) / random).argmax(dim=-1, keepdim=True)
    return (best if tokens is None else tokens.gather(1, best))[:, 0], wrong

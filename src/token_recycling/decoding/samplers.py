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

# Processors that depend on a node's logits only, not on the preceding tokens.
NODE_WISE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


def are_node_wise(processors: Any) -> bool:
    """Return True if all ``processors`` of a row depend on a node's logits only."""
    listed = isinstance(processors, list)
    return listed and all(type(processor) in NODE_WISE for processor in processors)


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

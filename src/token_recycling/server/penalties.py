"""OpenAI's biases and penalties of repetition."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor


class BiasProcessor(LogitsProcessor):  # type: ignore[misc]
    """Adds to the logits of some tokens.

    Transformers' ``sequence_bias`` takes milliseconds a token for thousands of them.
    """

    def __init__(self, biases: dict[int, float]) -> None:
        """Add ``biases``, by token."""
        self._tokens = torch.tensor(list(biases), dtype=torch.long, device="cpu")
        self._biases = torch.tensor(list(biases.values()), device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return ``scores`` [1, V] with the biases."""
        tokens = self._tokens.to(scores.device)
        biases = self._biases.to(scores.device, scores.dtype)
        return scores.index_add(1, tokens, biases[None])


class PenaltyProcessor(LogitsProcessor):  # type: ignore[misc]
    """Lowers the logits of tokens that the answer contains already.

    A token that occurs n > 0 times in the answer loses ``presence`` + n · ``frequency``, as in
    OpenAI's reference; unlike Transformers' ``repetition_penalty``, the prompt does not count.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        """Apply the penalties to what follows the first ``prompt_length`` tokens."""
        self._begin, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return ``scores`` [1, V] with the penalties for ``input_ids`` int64 [1, t]."""
        answer = input_ids[0, self._begin :]
        counts = torch.bincount(answer, minlength=scores.shape[-1])[: scores.shape[-1]]
        return scores - self._presence * (counts > 0) - self._frequency * counts

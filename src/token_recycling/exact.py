"""The last projection in float32, for models in half precision."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from token_recycling.errors import TokenRecyclingError


class ExactHead:
    """While entered, a model's logits come out in float32, from hidden states as they are.

    Half precision rounds logits to eight or eleven bits, so the best two often tie or change
    places between two kernels. In float32 only the rounding of the hidden states is left. The
    price is a float32 copy of the projection's weights, and reading it at every forward.
    """

    def __init__(self, model: Any) -> None:
        """Copy the weights of ``model``'s output projection.

        Raises:
            TokenRecyclingError: the projection is no plain linear layer with weights in memory.
        """
        self.head = model.get_output_embeddings()
        weight = getattr(self.head, "weight", None)
        if type(self.head) is not torch.nn.Linear or weight is None or weight.is_meta:
            kind = type(self.head).__name__
            raise TokenRecyclingError(f"exact logits need a plain linear projection, not {kind}")
        self._entered = 0
        self._copy()

    def _version(self) -> list[Any]:
        """What changes when the weights do."""
        given = (self.head.weight, self.head.bias)
        return [(w.data_ptr(), w._version, w.device, w.shape) for w in given if w is not None]

    def _copy(self) -> None:
        bias = self.head.bias
        self.weight = self.head.weight.detach().float()
        self.bias = None if bias is None else bias.detach().float()
        self._copied = self._version()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Project ``hidden`` [B, q, d] to logits float32 [B, q, V]."""
        return linear(hidden.to(self.weight.device).float(), self.weight, self.bias)

    def __enter__(self) -> ExactHead:
        if not self._entered:
            if self._copied != self._version():  # trained, loaded or merged meanwhile
                self._copy()
            self._before = self.head.__dict__.get("forward")
            self.head.forward = self
        self._entered += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered -= 1
        if self._entered:
            return
        if self._before is None:
            del self.head.forward
        else:
            self.head.forward = self._before

"""The last projection in float32, for models in half precision."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from token_recycling.errors import TokenRecyclingError
from token_recycling.model.override import Override, is_covered
from token_recycling.modes import ordinary_tensors, without_autocast

ROWS = 4096  # of the weight that are compared at once


def version(weight: Tensor) -> tuple[int, int]:
    """Return what most writes to ``weight`` change; those through ``.data`` do not."""
    return weight.data_ptr(), -1 if weight.is_inference() else weight._version


_thread = threading.local()  # .heads: the ``Float32Head`` objects that this thread has entered


class StockHead(nullcontext[None]):
    """In place of an ``Float32Head``: a projection as it is."""

    def refresh(self) -> None:
        """Do nothing: there is no copy."""


class Float32Head:
    """While a thread has entered it, a model's logits come out in float32 in that thread.

    Half precision rounds logits to eight or eleven bits, so the best two often tie or change
    places between two kernels. In float32 only the rounding of the hidden states is left. The
    price is a float32 copy of the projection's weights, and reading it at every forward.

    The layer's ``forward`` is replaced once and for all; other threads get the class's.
    """

    def __init__(self, model: Any) -> None:
        """Copy the weights of ``model``'s output projection.

        Raises:
            TokenRecyclingError: the projection is no plain linear layer with weights in memory.
        """
        self.model = model
        self.head = model.get_output_embeddings()
        if not _is_plain(self.head):
            kind = type(self.head).__name__
            raise TokenRecyclingError(f"float32 logits need a plain linear LM head, not {kind}")
        self._copy()
        self._install()

    def _install(self) -> None:
        """Replace the layer's ``forward``, unless that was done: the layer of a copy has none."""
        if not is_covered(self.head, "forward", _forward):
            present = self.head.__dict__.get("forward")
            self.head.forward = Override(self.head, "forward", partial(_forward, present), present)

    def _version(self) -> list[Any]:
        """What most changes of the weights change."""
        given = (self.head.weight, self.head.bias)
        return [(*version(w), w.device, w.shape) for w in given if w is not None]

    def _copy(self) -> None:
        bias = self.head.bias
        with ordinary_tensors():
            self.weight = self.head.weight.detach().to(torch.float32, copy=True)
            self.bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
        self._copied = self._version()

    def refresh(self) -> None:
        """Copy the weights again if a single one has changed; called before every answer.

        A write through ``.data``, as merging an adapter does, leaves no trace but the values.
        """
        head = self.model.get_output_embeddings()
        if head is not self.head and _is_plain(head):  # else an adapter may be around it
            self.head = head
            self._copy()
        pairs = [(self.head.weight, self.weight)]
        if self.head.bias is not None and self.bias is not None:
            pairs.append((self.head.bias, self.bias))
        same = self._copied == self._version() and all(
            torch.equal(given.detach().float(), kept)
            for weight, copy in pairs
            for given, kept in zip(weight.split(ROWS), copy.split(ROWS))
        )
        if not same:
            self._copy()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Project ``hidden`` [B, q, d] to logits float32 [B, q, V], under autocast too."""
        with without_autocast(self.weight.device):
            return linear(hidden.to(self.weight.device).float(), self.weight, self.bias)

    def __enter__(self) -> Float32Head:
        self._install()
        heads = getattr(_thread, "heads", ())
        if self not in heads and self._copied != self._version():
            self._copy()  # trained or loaded meanwhile
        _thread.heads = (*heads, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _thread.heads = _thread.heads[:-1]


def _is_plain(head: Any) -> bool:
    """True for a linear layer with weights in memory."""
    return type(head) is torch.nn.Linear and not head.weight.is_meta


def _forward(before: Any, stock: Any, hidden: Tensor) -> Tensor:
    """``forward`` of an LM head: in float32 for a thread that has entered its ``Float32Head``."""
    for entered in getattr(_thread, "heads", ()):
        if entered.head is stock.__self__:
            logits: Tensor = entered(hidden)
            return logits
    found: Tensor = stock(hidden) if before is None else before(hidden)
    return found

"""The LM head in float32, for models in half precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from skinny_kernels.attention import is_available
from skinny_kernels.elementwise import converted
from skinny_kernels.linear import DTYPES, product
from skinny_kernels.modes import ThreadContext, ordinary_tensors, without_autocast
from skinny_kernels.shadow import replace_forward
from token_recycling.errors import TokenRecyclingError

ROWS = 4096  # weight rows compared at a time


def version(weight: Tensor) -> tuple[int, int]:
    """Return a key that changes with most writes to ``weight``, but not through ``.data``."""
    return weight.data_ptr(), -1 if weight.is_inference() else weight._version


class StockHead(nullcontext[None]):
    """Stand-in for ``Float32Head`` that leaves the LM head unchanged."""

    def refresh(self) -> None:
        """Do nothing: there is no copy."""

    def cover(self, shadow: Any) -> None:
        """Do nothing: its logits are those of its LM head."""


class Float32Head(ThreadContext):
    """Context manager that computes a model's logits in float32 in the current thread.

    Half precision rounds logits to 8 or 11 bits, so the top two often tie, or swap between two
    kernels. In float32 only the rounding of the hidden states remains. The cost is a float32 copy
    of the LM head's weights, read at every forward.

    Meanwhile the layer's ``forward`` is replaced; for threads outside the context it calls the
    original. The layer of a shadow always computes in float32 (see ``cover``).
    """

    def __init__(self, model: Any) -> None:
        """Copy the weights of ``model``'s LM head.

        Raises:
            TokenRecyclingError: the LM head is not a plain linear layer with weights in memory.
        """
        self.model = model
        self.head: Any = model.get_output_embeddings()
        if not _is_plain(self.head):
            kind = type(self.head).__name__
            raise TokenRecyclingError(f"float32 logits need a plain linear LM head, not {kind}")
        self._copy()

    def cover(self, shadow: Any) -> None:
        """Let the LM head of a model's shadow compute in float32, inside an adapter too."""
        for module, twin in zip(self.model.modules(), shadow.modules()):
            if module is self.head:
                replace_forward(twin, _in_float32, self)

    def _version(self) -> list[Any]:
        """Return a key that changes with most changes of the weights."""
        given = (self.head.weight, self.head.bias)
        return [(*version(w), w.device, w.shape) for w in given if w is not None]

    def _copy(self) -> None:
        bias = self.head.bias
        with ordinary_tensors():
            self.weight = _copied(self.head.weight, getattr(self, "weight", None))
            before = getattr(self, "bias", None)
            self.bias = None if bias is None else _copied(bias, before)
        self._copied = self._version()

    def refresh(self) -> None:
        """Copy the weights again if any value has changed; called before every answer.

        Values are compared because a write through ``.data``, as when merging an adapter, cannot
        be detected otherwise.
        """
        head = self.model.get_output_embeddings()
        if head is not self.head and _is_plain(head):  # otherwise it may be wrapped by an adapter
            self.head = head
            self._copy()
        pairs = [(self.head.weight, self.weight)]
        if self.head.bias is not None and self.bias is not None:
            pairs.append((self.head.bias, self.bias))
        same = self._copied == self._version() and all(
            torch.equal(given.detach().float(), copied)
            for weights in pairs
            for given, copied in zip(*(torch.split(weight, ROWS) for weight in weights))
        )
        if not same:
            self._copy()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Project ``hidden`` [B, q, d] to logits float32 [B, q, V], also under autocast."""
        with without_autocast(self.weight.device):
            hidden = hidden.to(self.weight.device)
            if hidden.is_cpu and hidden.dtype in DTYPES and hidden.numel() and is_available():
                inputs = converted(hidden.contiguous(), torch.float32)
                return product(inputs, self.weight, self.bias)
            return linear(hidden.float(), self.weight, self.bias)

    def __enter__(self) -> Float32Head:
        if self not in self.entered.objects and self._copied != self._version():
            self._copy()  # trained or loaded since
        _replaced.enter(self.head)
        super().__enter__()
        return self

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)
        _replaced.leave()


def _copied(given: Tensor, before: Tensor | None) -> Tensor:
    """Copy weights to float32, to where they were before: recorded steps read them there."""
    if before is None or before.shape != given.shape or before.device != given.device:
        return given.detach().to(torch.float32, copy=True)
    return before.copy_(given.detach())


def _is_plain(head: Any) -> bool:
    """Return whether ``head`` is a plain linear layer with weights in memory."""
    return type(head) is torch.nn.Linear and not head.weight.is_meta


def _in_float32(head: Float32Head, layer: Any, stock: Any, hidden: Tensor) -> Tensor:
    """``forward`` of the LM head of a shadow."""
    return head(hidden)


class _Replaced:
    """The LM heads whose ``forward`` is replaced while any thread is inside a ``Float32Head``."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._before: list[tuple[Any, Callable[..., Any] | None]] = []

    def enter(self, head: Any) -> None:
        """Replace the ``forward`` of ``head`` unless already done."""
        with self._lock:
            self._inside += 1
            if not any(other is head for other, _ in self._before):
                before = head.__dict__.get("forward")
                stock = before or type(head).forward.__get__(head)
                self._before.append((head, before))
                head.__dict__["forward"] = partial(_forward, head, stock)

    def leave(self) -> None:
        """Put back what was there, when the last thread leaves."""
        with self._lock:
            self._inside -= 1
            while not self._inside and self._before:
                head, before = self._before.pop()
                if before is None:
                    head.__dict__.pop("forward", None)
                else:
                    head.__dict__["forward"] = before


_replaced = _Replaced()


def _forward(head: Any, stock: Callable[..., Any], hidden: Tensor) -> Tensor:
    """``forward`` of an LM head: float32 in threads inside its ``Float32Head``."""
    for entered in Float32Head.entered.objects:
        if entered.head is head:
            logits: Tensor = entered(hidden)
            return logits
    output: Tensor = stock(hidden)
    return output

"""PyTorch modes for computations outside the model's forward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import clear_frames
from types import TracebackType
from typing import Any, ClassVar

import torch


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Leave inference mode, so that new tensors can be modified later; gradients stay off."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disable the caller's autocast for computations outside the model's forward."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


_guards: list[Any] = []  # each puts back what it found when it is freed, so none must be


class RestoredModes:
    """Context manager that leaves gradients and inference mode as they were, interrupted or not.

    A keyboard interrupt within the ``__exit__`` of a context manager leaves its mode on until the
    interrupt's frames are freed. So they are freed here, and the modes put back.
    """

    def __enter__(self) -> None:
        self._before = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            return
        clear_frames(trace)
        inference, gradients = self._before
        if torch.is_inference_mode_enabled() != inference:
            _guards.append(torch._C._InferenceMode(inference))
        torch.set_grad_enabled(gradients)


class _Entered(threading.local):
    objects: tuple[Any, ...] = ()


class ThreadContext:
    """Base class of context managers that hold in the thread that enters them.

    Attributes:
        entered: ``entered.objects`` are those of the class that this thread is inside, the
            innermost last.
    """

    entered: ClassVar[_Entered]

    def __init_subclass__(cls) -> None:
        cls.entered = _Entered()

    def __enter__(self) -> Any:
        self.entered.objects = (*self.entered.objects, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.entered.objects = self.entered.objects[:-1]

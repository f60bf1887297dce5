"""PyTorch modes for computations outside the model's forward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

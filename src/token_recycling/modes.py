"""PyTorch modes for computations outside the model's forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

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

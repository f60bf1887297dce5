"""PyTorch's modes around computations that are not the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Create tensors that may be written to and kept, even inside a caller's inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch a caller's autocast off for computations that are not the model's own."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()

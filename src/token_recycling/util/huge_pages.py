"""Memory in huge pages, which a processor reads faster than memory in pages of 4 KB."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

HUGE = 2**21  # bytes of a huge page
ALIGNED = 64  # bytes, of a line of the caches
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def has_huge_pages() -> bool:
    """Return whether the kernel gives huge pages to those that ask for them."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in SETTING.read_text()
    except OSError:
        return False


class Arena:
    """Memory for tensors that are kept together, in huge pages as far as the kernel has some."""

    def __init__(self, tensors: list[int]) -> None:
        """Reserve memory for tensors of so many bytes each; it is used as they are copied."""
        size = HUGE + sum(n + ALIGNED for n in tensors)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = -self._bytes.data_ptr() % HUGE

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a uint8 tensor in this memory."""
        found = self._bytes[self._used : self._used + tensor.numel()].view(tensor.shape)
        self._used += -(-tensor.numel() // ALIGNED) * ALIGNED
        return found.copy_(tensor)

"""Memory in huge pages, which a processor reads faster than memory in pages of 4 KB."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

HUGE = 2**21  # bytes of a huge page
ALIGNED = 64  # bytes, of a line of the caches
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEMORY = Path("/proc/meminfo")


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
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = -torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr() % HUGE

    def new(self, shape: Sequence[int]) -> Tensor:
        """Return a uint8 tensor that is not empty, in this memory.

        It has a storage of its own: pickling one tensor does not write those beside it.
        """
        n, begin = math.prod(shape), self._used
        self._used += -(-n // ALIGNED) * ALIGNED
        region = torch.frombuffer(self._memory, dtype=torch.uint8, count=n, offset=begin)
        return region.view(*shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a uint8 tensor that is not empty, in this memory."""
        return self.new(tensor.shape).copy_(tensor)


def move(tensors: Iterable[Tensor]) -> None:
    """Give tensors memory in huge pages: their ``data`` become copies in one arena.

    Tensors that share their memory still do. Those that are no plain contiguous tensors on the CPU
    stay where they are, and so do all if the copies would take more than half of the memory that is
    available, or if the system has no huge pages.
    """
    if not has_huge_pages():
        return
    alike: dict[tuple[int, torch.Size, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        data = tensor.data
        if type(data) is Tensor and data.is_cpu and data.is_contiguous() and data.numel():
            alike.setdefault((data.data_ptr(), data.shape, data.dtype), []).append(tensor)
    sizes = [shared[0].nbytes for shared in alike.values()]
    if not sizes or 2 * sum(sizes) > _available():
        return
    arena = Arena(sizes)
    for shared in alike.values():
        old = shared[0].data
        new = arena.copy(old.view(-1).view(torch.uint8)).view(old.dtype).view(old.shape)
        for tensor in shared:
            tensor.data = new


def _available() -> int:
    """Return the bytes of memory that are available; 0 if the system does not say."""
    try:
        lines = MEMORY.read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))

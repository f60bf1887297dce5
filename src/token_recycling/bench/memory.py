"""The most memory that a piece of work has used."""

from __future__ import annotations

import re
from pathlib import Path

import torch

RESET_PEAK = "5"  # see proc(5), clear_refs


class PeakMemory:
    """Bytes at most since ``reset``: of the process on a CPU, of the allocator on CUDA."""

    def __init__(self, device: torch.device) -> None:
        """Watch ``device``."""
        self.device = device

    def reset(self) -> None:
        """Begin anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        except OSError:  # no Linux, or not allowed: the peak is that of the whole process
            return

    def read(self) -> int | None:
        """Bytes, or None where the system does not say."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return None
        found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(found[1]) * 1024 if found else None

"""Peak memory of a piece of work."""

from __future__ import annotations

import re
from pathlib import Path

import torch

RESET_PEAK = "5"  # see proc(5), clear_refs


class PeakMemory:
    """Peak memory since ``reset``: of the process on a CPU, of PyTorch's allocator on CUDA."""

    def __init__(self, device: torch.device) -> None:
        """Measure on ``device``."""
        self.device = device

    def reset(self) -> None:
        """Reset the peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        except OSError:  # not Linux, or not permitted: the peak covers the whole process lifetime
            return

    def read(self) -> int | None:
        """Return the peak in bytes, or None if the system does not report it."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return None
        match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(match[1]) * 1024 if match else None

"""Memory of the process: its peak, and what the C library has kept of what was freed."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import torch

RESET_PEAK = "5"  # see proc(5), clear_refs


def give_back() -> None:
    """Return freed memory to the system, where the C library is GNU's; else do nothing.

    It keeps what threads have freed: hundreds of MiB after large requests.
    """
    with suppress(OSError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak(device: torch.device) -> None:
    """Let ``peak`` begin anew; where Linux does not permit it, that is of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def peak(device: torch.device) -> int | None:
    """Return the peak in bytes, of PyTorch's allocator on CUDA, else of the process.

    None if the system does not report it.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = ""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
    match = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else None

"""What a program runs on: names of devices and versions."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from token_recycling import __version__

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")


def processor() -> str:
    """Name of the CPU."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(": ", 1)[-1]
    return platform.processor() or platform.machine()


def instructions() -> list[str]:
    """Of the instruction sets that decide what a product of matrices costs, those of the CPU."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return []
    for line in info.read_text(errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return [name for name in INSTRUCTIONS if name in line.split()]
    return []


def device_name(device: torch.device) -> str:
    """Name of the hardware behind ``device``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor() if device.type == "cpu" else f"{device.type} on {processor()}"


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def commit() -> str:
    """Commit of the checkout that this package was imported from, or ""."""
    folder = Path(__file__).parent
    ask = ["git", "-C", str(folder), "rev-parse", "--show-prefix", "HEAD"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True).stdout.split()
    except OSError:
        return ""
    # Installed in a virtual environment, it may lie within somebody else's repository.
    return found[1] if found[:1] == [f"src/{folder.name}/"] else ""


def describe(device: torch.device) -> dict[str, Any]:
    """Return hardware, versions, commit and command line as JSON types."""
    memory = 0
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": processor(),
        "instructions": instructions(),
        "device": str(device),
        "device_name": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "token_recycling": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }

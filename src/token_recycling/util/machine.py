"""A description of the hardware and software in use."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import transformers

from token_recycling.version import __version__

CLEAR = 0.97  # ratio of two times below which the first one is clearly less
ROUNDS = 5  # of which a time is the median
PAUSE = 2_000_000  # clock cycles of a GPU, about a millisecond
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")


def _told_of_cpu(*keys: str) -> str:
    """Return what Linux tells of the first core under one of these keys, or ""."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(keys):
                return line.partition(": ")[2]
    return ""


def processor() -> str:
    """Return the name of the CPU."""
    return _told_of_cpu("model name") or platform.processor() or platform.machine()


def instructions() -> list[str]:
    """Return those of ``INSTRUCTIONS``, which affect matrix products, that the CPU has."""
    told = _told_of_cpu("flags", "Features").split()
    return [name for name in INSTRUCTIONS if name in told]


def device_name(device: torch.device) -> str:
    """Return the hardware name of ``device``."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor() if device.type == "cpu" else f"{device.type} on {processor()}"


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def commit() -> str:
    """Return the commit of the checkout that this package was imported from, or ""."""
    folder = Path(__file__).parents[1]
    ask = ["git", "-C", str(folder), "rev-parse", "--show-prefix", "HEAD"]
    try:
        words = subprocess.run(ask, capture_output=True, text=True).stdout.split()
    except OSError:
        return ""
    # An installed package may lie inside another repository, e.g. in its virtual environment.
    return words[1] if words[:1] == [f"src/{folder.name}/"] else ""


def median_seconds(run: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median of the seconds that ``run`` takes, until ``device`` has finished."""
    times = []
    for _ in range(rounds):
        synchronize(device)
        begin = perf_counter()
        run()
        synchronize(device)
        times.append(perf_counter() - begin)
    return median(times)


def device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median of the seconds that a GPU works on ``run``, as within a graph.

    The GPU is made to wait until all of it has been launched, so that the host's time does not
    count. Other devices: ``median_seconds``.
    """
    if device.type != "cuda":
        return median_seconds(run, device)
    times: list[float] = []
    cuda: Any = torch.cuda
    for _ in range(ROUNDS):
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda._sleep(PAUSE)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def is_faster(
    ours: Callable[[], object], theirs: Callable[[], object], device: torch.device
) -> bool:
    """Return whether a device clearly needs less time for ``ours`` than for ``theirs``."""
    return device_seconds(ours, device) < CLEAR * device_seconds(theirs, device)


def describe(device: torch.device) -> dict[str, Any]:
    """Return hardware, versions, commit and command line as JSON-compatible values."""
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

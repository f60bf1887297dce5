"""How many cores this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


@lru_cache
def usable_cores() -> int:
    """Return how many: those it may run on, and no more than its container's quota, rounded."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    return max(1, min([cores, *map(round, quotas(MEMBERSHIP, GROUPS))]))


def quotas(membership: Path, groups: Path) -> Iterator[float]:
    """Yield the limits of the control groups of this process, and of those around them, in cores.

    Args:
        membership: a line ``number:controllers:path`` for each hierarchy; version 2 has no
            controllers.
        groups: where the hierarchies are mounted.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = groups / "cpu" if controllers else groups
        inner = folder / path.strip("/")
        for group in (inner, *inner.parents):
            if not group.is_relative_to(folder):
                break
            quota = _quota(group, bool(controllers))
            if quota is not None:
                yield quota


def _quota(group: Path, is_version_1: bool) -> float | None:
    """Return the limit of a control group; None if it has none."""
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_version_1 else ("cpu.max",)
    try:
        words = " ".join((group / name).read_text() for name in names).split()
        quota, period = (float(word) for word in words)
    except (OSError, ValueError):  # "max", or nothing to be read
        return None
    return quota / period if quota > 0 and period > 0 else None

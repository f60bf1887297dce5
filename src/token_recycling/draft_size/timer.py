"""What a step of each size costs at the moment, from the steps that are taken anyway."""

from __future__ import annotations

from collections import deque
from math import log
from statistics import median

KNOWN = 3  # samples after which a size counts as measured
SAMPLES = 11  # kept per size
TRUST = 5  # samples that a measured curve counts for
RECENT = 7  # steps from which the machine's present speed is estimated
OUTLIER = 1.5  # a sample further off than this (of a logarithm) counts as this far off
SURPRISE = 0.25  # a sample further off than this asks for more of them


class StepTimer:
    """Corrections of a cost curve, per size, as logarithms.

    A machine that is slower for all sizes changes no choice between them. So a sample of one
    size is taken relative to the recent steps of the others.
    """

    def __init__(self, sizes: int, usual: int, trusted: bool) -> None:
        """Begin without corrections.

        Args:
            sizes: how many there are.
            usual: the one that the first steps take; the others are measured against it.
            trusted: the curve was measured on this machine.
        """
        self._samples: list[deque[float]] = [deque(maxlen=SAMPLES) for _ in range(sizes)]
        for size in range(sizes) if trusted else (usual,):
            self._samples[size].extend([0.0] * (TRUST if trusted else KNOWN))
        self._surprised = [False] * sizes
        self._recent: deque[float] = deque(maxlen=RECENT)

    def is_known(self, size: int) -> bool:
        """True when ``size`` was measured several times and the last time brought no surprise."""
        return len(self._samples[size]) >= KNOWN and not self._surprised[size]

    def record(self, size: int, seconds: float, expected: float, usual: bool) -> None:
        """Take the time of a step and what the curve says of it.

        Args:
            size: index of the size.
            seconds: measured.
            expected: by the curve, in any unit.
            usual: True for the size that the others are measured against.
        """
        found = log(seconds / expected)
        believed = self.correction(size)
        known = len(self._samples[size]) >= KNOWN
        if usual and known:
            self._recent.append(found - believed)
        elif len(self._recent) >= KNOWN:
            off = found - median(self._recent) - believed
            self._surprised[size] = abs(off) > SURPRISE
            self._samples[size].append(believed + min(max(off, -OUTLIER), OUTLIER))

    def correction(self, size: int) -> float:
        """Logarithm of how much more a step of ``size`` costs than the curve says.

        That of a size never measured is interpolated.
        """
        if self._samples[size]:
            return median(self._samples[size])
        known = [i for i, samples in enumerate(self._samples) if samples]
        below = max((i for i in known if i < size), default=None)
        above = min((i for i in known if i > size), default=None)
        if below is None or above is None:
            end = above if below is None else below
            assert end is not None
            return median(self._samples[end])
        fraction = (size - below) / (above - below)
        low, high = median(self._samples[below]), median(self._samples[above])
        return low + fraction * (high - low)

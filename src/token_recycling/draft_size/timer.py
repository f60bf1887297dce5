"""The current cost of steps of each size, measured on the steps of ordinary decoding."""

from __future__ import annotations

from collections import deque
from math import log
from statistics import median

KNOWN = 3  # samples after which a size counts as measured
SAMPLES = 11  # kept per size
TRUST = 2  # weight of a measured curve, in samples
RECENT = 7  # steps from which the machine's current speed is estimated
OUTLIER = 1.5  # larger deviations, of logarithms, are clipped to this
SURPRISE = 0.25  # after a larger deviation, the size is measured more often


class StepTimer:
    """Corrections of a cost curve, per size, as logarithms.

    A slowdown of all sizes does not affect the choice between them. Therefore a sample of a size is
    taken relative to recent steps of the usual size.
    """

    def __init__(self, sizes: int, usual: int, trusted: bool) -> None:
        """Start without corrections.

        Args:
            sizes: the number of sizes.
            usual: index of the size of the first steps, against which others are measured.
            trusted: True if the curve was measured on this machine.
        """
        self._samples: list[deque[float]] = [deque(maxlen=SAMPLES) for _ in range(sizes)]
        if trusted:
            for samples in self._samples:
                samples.extend([0.0] * TRUST)
        self._samples[usual].extend([0.0] * KNOWN)
        self._surprised = [False] * sizes
        self._recent: deque[float] = deque(maxlen=RECENT)

    def is_known(self, size: int) -> bool:
        """Return True if ``size`` has enough samples and the last one was close to expectation."""
        return len(self._samples[size]) > TRUST and not self._surprised[size]

    def record(self, size: int, seconds: float, expected: float, usual: bool) -> None:
        """Add the time of a step.

        Args:
            size: index of the step's size.
            seconds: measured time.
            expected: cost by the curve, in any unit.
            usual: True for the size against which the others are measured.
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
        """Return log(actual cost / cost by the curve) for steps of ``size``.

        For a size without samples it continues the line between the two nearest sizes that have
        some: an assumed curve is wrong by its slope.
        """
        if self._samples[size]:
            return median(self._samples[size])
        known = [i for i, samples in enumerate(self._samples) if samples]
        if len(known) == 1:
            return median(self._samples[known[0]])
        near, far = sorted(known, key=lambda i: abs(i - size))[:2]
        low, high = median(self._samples[near]), median(self._samples[far])
        return low + (size - near) / (far - near) * (high - low)

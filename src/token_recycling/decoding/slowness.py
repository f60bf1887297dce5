"""One line for those whose answers are slow because other programs run."""

from __future__ import annotations

from time import monotonic

from token_recycling.decoding.metrics import Stats

LOST = 0.4  # share of decoding without a core from which on it is mentioned
LEAST = 1.0  # seconds of decoding below which it is not
PAGE = "docs/slow.md"


def why_slow(stats: Stats) -> str | None:
    """Return a line if the decoding thread often had no core, else None."""
    seconds = stats.decode_seconds
    if seconds < LEAST or stats.lost_seconds < LOST * seconds:
        return None
    return (
        f"decoding had no processor core for {stats.lost_seconds / seconds:.0%} of its time: other "
        f"programs, or the limit of a container, use them ({PAGE} says what can be done)"
    )


class Reminder:
    """Lets a line pass at most once in a while."""

    def __init__(self, seconds: float = 3600.0) -> None:
        """Let the next line pass, then none for so many seconds."""
        self._seconds, self._last = seconds, -seconds

    def due(self, line: str | None) -> str | None:
        """Return the line if it is to be shown now, else None."""
        if line is None or monotonic() - self._last < self._seconds:
            return None
        self._last = monotonic()
        return line

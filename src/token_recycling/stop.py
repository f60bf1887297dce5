"""When a row ends: checked for every single token, in the middle of an accepted path too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol


class TokenReader(Protocol):
    """Reads a row's tokens one after another and knows when its text is to end."""

    def feed(self, token: int) -> bool:
        """Take one more token; True when the text ends with it."""


class StopRules:
    """The rules of a batch; call it with every emitted token, in order."""

    def __init__(
        self,
        limits: Sequence[int],
        eos: Collection[int] = (),
        readers: Sequence[TokenReader] | None = None,
        criteria: Sequence[Callable[[int, int], str | None]] | None = None,
    ) -> None:
        """Set the rules.

        Args:
            limits: per row the tokens that it may emit, from ``max_new_tokens`` and the context.
            eos: ids that end a row.
            readers: per row what looks for stop strings.
            criteria: per row more rules, each called with row 0 of its own and the token.
        """
        self.limits, self.eos, self.readers = limits, frozenset(eos), readers
        self.criteria = criteria
        self.emitted = [0] * len(limits)

    def __call__(self, row: int, token: int) -> str | None:
        """Return "eos", "stop" or "length" when ``row`` ends with ``token``, else None."""
        self.emitted[row] += 1
        stopped = self.readers is not None and self.readers[row].feed(token)
        reason = self.criteria[row](0, token) if self.criteria is not None else None
        if token in self.eos or reason == "eos":
            return "eos"
        if stopped:
            return "stop"
        if reason is not None:
            return reason
        return "length" if self.emitted[row] >= self.limits[row] else None

"""The cost of a decoding step on this machine: the cost curve and its file."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.util.files import write_text

FORMAT = "token-recycling-costs-1"
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81)  # tokens verified, including the root
# Assumed cost of each further token, relative to a step of one token. A data-centre GPU verified
# 81 tokens at the cost of 1.23 steps (A100, 7B), two CPU cores at that of 3 to 4.
ASSUMED = {"cuda": 0.003, "cpu": 0.03}
ASSUMED_ELSEWHERE = 0.02


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly; extrapolate from the first or last segment."""
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    fraction = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + fraction * (ys[i] - ys[i - 1])


@dataclass(frozen=True)
class CostCurve:
    """Cost of a step by tokens verified and context length.

    Attributes:
        sizes: tokens verified, ascending.
        contexts: tokens in the cache, ascending.
        seconds: ``seconds[context][size]`` of a step over all phases; in an assumed curve,
            relative to a step of one token.
        measured: False for an assumed curve.
        about: model and machine of the measurement (see ``identity``).
    """

    sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    measured: bool = True
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def assumed(cls, device_type: str) -> CostCurve:
        """Return an assumed curve for a type of device."""
        slope = ASSUMED.get(device_type, ASSUMED_ELSEWHERE)
        return cls(SIZES, (0,), (tuple(1 + slope * (n - 1) for n in SIZES),), measured=False)

    def at(self, tokens: float, context: float) -> float:
        """Return the cost of a step of ``tokens`` after ``context`` cached tokens.

        It is interpolated between the points; ``_slopes`` says how it goes on beyond the sizes.
        """
        beyond = tokens - self.sizes[-1]
        if beyond > 0:
            rows = [row[-1] + beyond * slope for row, slope in zip(self.seconds, self._slopes)]
        else:
            rows = [_line(self.sizes, row, tokens) for row in self.seconds]
        cost = _line(self.contexts, rows, min(max(context, self.contexts[0]), self._longest))
        return max(cost, 1e-9)

    @cached_property
    def _slopes(self) -> list[float]:
        """Cost of each further token beyond the largest size, by context.

        A batch verifies many times the tokens that were measured, so an error of the last point
        would be multiplied. The steepest rise to a size at least twice as large is taken: drafts
        that turn out too small cost little time, those that turn out too large cost a lot. The
        first sizes are left out, because many CPUs compute their products in another way.
        """
        n = len(self.sizes)
        first = next(i for i in range(n) if 8 * self.sizes[i] >= self.sizes[-1])
        pairs = [
            (i, j)
            for i in range(first, n)
            for j in range(i, n)
            if self.sizes[j] >= 2 * self.sizes[i]
        ]
        return [
            max(
                ((row[j] - row[i]) / (self.sizes[j] - self.sizes[i]) for i, j in pairs), default=0.0
            )
            for row in self.seconds
        ]

    @property
    def _longest(self) -> int:
        """Largest context to extrapolate to: twice the longest one measured."""
        return 2 * self.contexts[-1]

    def save(self, path: Path) -> None:
        """Write the curve atomically as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        write_text(path, text)

    @classmethod
    def load(cls, path: Path) -> CostCurve:
        """Read a file written by ``save``.

        Raises:
            TokenRecyclingError: the file cannot be read or is not a cost curve.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            curve = cls(
                tuple(map(int, data["sizes"])),
                tuple(map(int, data["contexts"])),
                tuple(tuple(map(float, row)) for row in data["seconds"]),
                bool(data["measured"]),
                dict(data["about"]),
            )
            whole = (
                data["format"] == FORMAT
                and all(len(row) == len(curve.sizes) for row in curve.seconds)
                and len(curve.seconds) == len(curve.contexts) > 0
                and all(0 < cost < 1e6 for row in curve.seconds for cost in row)
                and list(curve.sizes) == sorted(set(curve.sizes))
                and list(curve.contexts) == sorted(set(curve.contexts))
                and curve.sizes[:1] == (1,)
                and curve.sizes[-1] < 1e6
                and 0 <= curve.contexts[0] <= curve.contexts[-1] < 1e9
            )
        # All that malformed JSON can raise, including huge numbers and deeply nested lists.
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as e:
            reason = f"{type(e).__name__}: {one_line(e, 80)}"
            raise TokenRecyclingError(
                f"{path} is not a cost curve ({reason}); run token-recycling tune again"
            ) from e
        if not whole:
            raise TokenRecyclingError(f"{path} is not a cost curve; run token-recycling tune again")
        return curve

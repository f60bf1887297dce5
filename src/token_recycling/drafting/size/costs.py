"""The cost of a decoding step by tokens verified: the curve and its file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from skinny_kernels.errors import one_line
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import make_folder, write_text

FORMAT = "token-recycling-costs-2"
# Assumed cost of each further token, relative to a step of one token. Two CPU cores verified 81
# tokens at the cost of 3 to 4 steps.
ASSUMED, ASSUMED_ELSEWHERE = {"cpu": 0.03}, 0.02
# By tokens on a data-centre GPU: 64 as measured for 8B parameters on an H100; beyond, arithmetic
# takes longer than reading the weights, estimated for 60 % of its 989 TFLOP/s.
ASSUMED_CUDA = ((1, 64, 128, 256, 512, 1024), (1.0, 1.08, 1.2, 1.6, 2.6, 4.7))
# Of a file: points of the curve, and the cost of a step, below which its numbers make no sense.
MOST_POINTS, LEAST_COST = 1000, 1e-7


@dataclass(frozen=True)
class CostCurve:
    """Cost of a step by tokens verified.

    Attributes:
        sizes: tokens verified, the root included; ascending, 1 first.
        seconds: of a step over all phases; in an assumed curve, relative to a step of one token.
        measured: False for an assumed curve.
        about: model and machine of the measurement (see ``cost_measurement.identity``).
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    measured: bool = True
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def assumed(cls, device_type: str) -> CostCurve:
        """Return an assumed curve for a type of device: on a CPU a straight line."""
        if device_type == "cuda":
            return cls(*ASSUMED_CUDA, measured=False)
        slope = ASSUMED.get(device_type, ASSUMED_ELSEWHERE)
        return cls((1, 2), (1.0, 1 + slope), measured=False)

    def at(self, tokens: Any) -> Any:
        """Return the cost of steps: interpolated, and beyond the last size by ``_slope``.

        Args:
            tokens: a number or an array of numbers of tokens verified.
        """
        beyond = np.maximum(np.asarray(tokens) - self.sizes[-1], 0)
        return np.interp(tokens, self.sizes, self.seconds) + beyond * self._slope

    @cached_property
    def _slope(self) -> float:
        """Cost of each further token beyond the largest size.

        A batch verifies many times the tokens that were measured, so an error of the last point
        would be multiplied. The steepest rise to a size at least twice as large is taken: drafts
        that turn out too small cost little time, those that turn out too large cost a lot. The
        first sizes are left out, because many CPUs compute their products in another way.
        """
        points = [(n, cost) for n, cost in zip(self.sizes, self.seconds) if 8 * n >= self.sizes[-1]]
        rises = [(high - low) / (m - n) for n, low in points for m, high in points if m >= 2 * n]
        return max([0.0, *rises])

    def save(self, path: Path) -> None:
        """Write the curve atomically as JSON.

        Raises:
            TokenRecyclingError: the file cannot be written.
        """
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        make_folder(path.parent)
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
                tuple(map(float, data["seconds"])),
                bool(data["measured"]),
                dict(data["about"]),
            )
            well_formed = (
                data["format"] == FORMAT
                and len(curve.seconds) == len(curve.sizes)
                and len(curve.sizes) <= MOST_POINTS
                and all(LEAST_COST < cost < 1e6 for cost in curve.seconds)
                and list(curve.sizes) == sorted(set(curve.sizes))
                and curve.sizes[:1] == (1,)
                and curve.sizes[-1] < 1e6
            )
        # All that malformed JSON can raise, including huge numbers and deeply nested lists.
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as e:
            reason = f"{type(e).__name__}: {one_line(e, 80)}"
            raise TokenRecyclingError(f"{path} is not a cost curve ({reason})") from e
        if not well_formed:
            raise TokenRecyclingError(f"{path} is not a cost curve")
        return curve

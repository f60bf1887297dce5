"""What a decoding step costs on this machine: the curve, and the file that it is kept in."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.files import write_text
from token_recycling.machine import device_name
from token_recycling.model.limits import text_config

FORMAT = "token-recycling-costs-1"
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 81)  # tokens verified, the root included
# What one more token adds to a step of one token, where nothing was measured: a data-centre GPU
# verified 81 tokens at 1.23 steps (A100, 7B), two CPU cores at 3 to 4.
ASSUMED = {"cuda": 0.003, "cpu": 0.03}
ASSUMED_ELSEWHERE = 0.02


def _line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate linearly; beyond the ends, go on like the last piece."""
    if len(xs) == 1:
        return ys[0]
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    fraction = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + fraction * (ys[i] - ys[i - 1])


@dataclass(frozen=True)
class CostCurve:
    """Cost of a step by tokens verified and by context length.

    Attributes:
        sizes: tokens verified, ascending.
        contexts: tokens in the cache, ascending.
        seconds: per context, per size; of one step, all phases. In an assumed curve relative to
            a step of one token.
        measured: False for an assumed curve.
        about: what it was measured on.
    """

    sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    measured: bool = True
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def assumed(cls, device_type: str) -> CostCurve:
        """Return a guess for a kind of device."""
        slope = ASSUMED.get(device_type, ASSUMED_ELSEWHERE)
        return cls(SIZES, (0,), (tuple(1 + slope * (n - 1) for n in SIZES),), measured=False)

    def at(self, tokens: float, context: float) -> float:
        """Cost of a step that verifies ``tokens`` behind ``context``, by interpolation."""
        rows = [_line(self.sizes, row, tokens) for row in self.seconds]
        cost = _line(self.contexts, rows, min(max(context, self.contexts[0]), self._longest))
        return max(cost, 1e-9)

    @property
    def _longest(self) -> int:
        """Beyond the contexts measured the line goes on, up to twice the last."""
        return 2 * self.contexts[-1]

    def save(self, path: Path) -> None:
        """Write the curve as JSON; the file appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"
        write_text(path, text)

    @classmethod
    def load(cls, path: Path) -> CostCurve:
        """Read what ``save`` wrote.

        Raises:
            TokenRecyclingError: the file cannot be read or is no curve.
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
        # What hand-made JSON can raise, numbers without end and lists without bottom among it.
        except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as e:
            reason = f"{type(e).__name__}: {one_line(e, 80)}"
            raise TokenRecyclingError(f"{path} is no cost curve ({reason}); run tune") from e
        if not whole:
            raise TokenRecyclingError(f"{path} is no cost curve; run token-recycling tune again")
        return curve


def identity(model: Any, device: torch.device) -> dict[str, Any]:
    """What a curve depends on: the model's shape and type, the device and its threads."""
    config = text_config(model.config).to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "widened"):
        config.pop(name, None)
    shape = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    quantised = type(getattr(model, "hf_quantizer", None)).__name__
    return {
        "model": type(model).__name__,
        "config": shape[:16],
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantiser": "" if quantised == "NoneType" else quantised,
        "attention": getattr(model.config, "_attn_implementation", None) or "eager",
        "device": device_name(device),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "torch": torch.__version__,
    }


def cache_folder() -> Path:
    """``$TOKEN_RECYCLING_CACHE``, or ``token-recycling`` in the user's cache folder."""
    if own := os.environ.get("TOKEN_RECYCLING_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "token-recycling"


def cached_path(about: dict[str, Any]) -> Path:
    """Where the curve of ``identity`` is kept."""
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{about['model']}-{name}.json"


def find(model: Any, device: torch.device) -> CostCurve:
    """Return the curve that ``tune`` kept for this model and machine, or an assumed one."""
    path = cached_path(identity(model, device))
    if path.is_file():
        try:
            return CostCurve.load(path)
        except TokenRecyclingError as error:  # no reason to fail; tune writes it anew
            warnings.warn(f"measured costs are ignored: {error}", stacklevel=2)
    return CostCurve.assumed(device.type)

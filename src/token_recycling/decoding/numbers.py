"""The numbers among the options of an answer, which Transformers does not always check."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from token_recycling.errors import TokenRecyclingError

INFINITY = float("inf")
RANGES = {
    "max_new_tokens": (1, INFINITY),
    "temperature": (0.0, INFINITY),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (0, INFINITY),
    "repetition_penalty": (1e-6, INFINITY),
}
WHOLE = ("max_new_tokens", "top_k")
# Not used where nothing is sampled; Transformers then warns of them.
SAMPLING_ONLY = ("top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
KINDS: tuple[Any, Any] = (Real, Integral)


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with their numbers as Python's; NumPy's are not taken by Transformers.

    Raises:
        TokenRecyclingError: a number has the wrong type or is out of range.
    """
    given = dict(options)
    for name, (low, high) in RANGES.items():
        if name not in given:
            continue
        value: Any = given[name]
        is_integer = name in WHOLE
        if isinstance(value, bool) or not isinstance(value, KINDS[is_integer]):
            kind = "a whole number" if is_integer else "a number"
            raise TokenRecyclingError(f"{name} is {value!r}; it must be {kind}")
        given[name] = int(value) if is_integer else float(value)
        if not low <= given[name] <= high:
            allowed = f"{low:g} or more" if high == INFINITY else f"from {low:g} to {high:g}"
            raise TokenRecyclingError(f"{name} is {value}; it must be {allowed}")
    if 0 < given.get("temperature", 0.0) < 1e-5:
        raise TokenRecyclingError(
            f"temperature is {given['temperature']}; it must be 0, or 1e-5 or more"
        )
    return given

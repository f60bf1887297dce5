"""JSON within limits that are checked before anything is built of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

MOST_DEPTH = 100
MOST_VALUES = 2**19
TOO_DEEP = f"is nested deeper than {MOST_DEPTH} levels"
QUOTE, COMMA, OPEN, CLOSE = b'",{}'  # a bracket is a brace without its sixth bit
SIXTH = 0x20


class JsonLimitError(ValueError):
    """JSON that is nested too deeply or has too many values, as the end of a sentence."""


def loads(text: bytes) -> Any:
    """Return the value of JSON text.

    Raises:
        JsonLimitError: it is beyond ``MOST_DEPTH`` or ``MOST_VALUES``.
        ValueError: it is not JSON.
    """
    if b"\0" in text:
        raise ValueError("not UTF-8")
    # Up to the first place that is not JSON, what is left has quotes only around strings.
    signs = np.frombuffer(text.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    strings = np.cumsum(signs == QUOTE, dtype=np.int32) % 2 == 1
    braces = np.where(strings, 0, signs | SIXTH)
    opened, closed = (braces == OPEN).view(np.int8), (braces == CLOSE).view(np.int8)
    if len(signs) and int(np.cumsum(opened - closed, dtype=np.int32).max()) > MOST_DEPTH:
        raise JsonLimitError(TOO_DEEP)
    separators = np.count_nonzero((signs == COMMA) & ~strings)
    if separators + np.count_nonzero(opened) > MOST_VALUES:
        raise JsonLimitError(f"has more than {MOST_VALUES} values")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise JsonLimitError(TOO_DEEP) from error

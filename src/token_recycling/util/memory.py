"""Memory that the C library has kept of what was freed."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Return freed memory to the system, where the C library is GNU's; else do nothing.

    It keeps what threads have freed: hundreds of MiB after large requests.
    """
    with suppress(OSError, AttributeError, TypeError):  # TypeError: CDLL(None) on Windows
        ctypes.CDLL(None).malloc_trim(0)

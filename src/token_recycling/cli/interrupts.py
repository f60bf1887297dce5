"""Ctrl-C: it ends the process at once until a model is loaded, and raises afterwards.

Until then there is nothing to be saved, and what is imported or compiled may swallow an exception:
Transformers' lazy imports turn it into another one, numba's callbacks print it and go on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from token_recycling.errors import INTERRUPTED

SHOW_CURSOR = "\x1b[?25h"  # a spinner hides it


def end_at_once() -> None:
    """Let an interrupt end this process with one line, if it would raise now."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let an interrupt raise ``KeyboardInterrupt``, if it would end this process now."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def raising() -> Iterator[None]:
    """Let interrupts raise meanwhile, where something is to be cleaned up."""
    ends = signal.getsignal(signal.SIGINT) is _end
    raise_again()
    try:
        yield
    finally:
        if ends:
            end_at_once()


def _end(number: int, frame: Any) -> None:
    cursor = SHOW_CURSOR if sys.stderr is not None and sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(2, f"{cursor}interrupted\n".encode())
    os._exit(INTERRUPTED)

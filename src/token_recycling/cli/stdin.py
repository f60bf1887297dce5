"""What comes on stdin: a prompt, or what a prompt is about."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

PATIENCE = 3.0  # seconds after which a terminal is told what is being waited for


def piped() -> bool:
    """True where something is connected to stdin that ends: a file, a pipe or a socket."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # a test's stand-in, which can be read
        return not sys.stdin.isatty()
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def read() -> str:
    """Return all of stdin; "" where it cannot be read."""
    with _waiting_shown():
        try:
            return sys.stdin.read().removeprefix("\ufeff")  # a byte order mark is no text
        except OSError:
            return ""


def joined(prompt: str | None) -> str:
    """Return ``prompt`` with what comes on stdin in front of it, as ``llm`` joins the two.

    A prompt of "-" is what comes on stdin alone.
    """
    if prompt == "-":
        return read()
    given = read() if piped() else ""
    return " ".join(part for part in (given, prompt) if part)


@contextmanager
def _waiting_shown() -> Iterator[None]:
    """Say on a terminal that stdin is being read, if that takes long."""
    line = "reading stdin; Ctrl-D ends it (< /dev/null: nothing to read)"
    timer = Timer(PATIENCE, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()

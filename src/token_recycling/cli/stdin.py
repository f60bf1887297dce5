"""Input on stdin: a prompt, or text that the prompt refers to."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

PATIENCE = 3.0  # seconds of waiting before a note is printed on a terminal


def piped() -> bool:
    """Return True if stdin is a file, a pipe or a socket, which end by themselves."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # replaced by an object without a file descriptor
        return not sys.stdin.isatty()
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def has_input() -> bool:
    """Return whether there is anything on stdin; waits until this is known."""
    peek = getattr(getattr(sys.stdin, "buffer", None), "peek", None)  # not of a replaced stdin
    return peek is not None and bool(peek(1))


def read() -> str:
    """Return all of stdin, or "" if it cannot be read."""
    with _waiting_shown():
        try:
            return sys.stdin.read().removeprefix("\ufeff")  # byte order mark
        except OSError:
            return ""


def joined(prompt: str | None) -> str:
    """Return the text on stdin followed by ``prompt``, joined as the ``llm`` tool does.

    If ``prompt`` is "-", return the text on stdin alone.
    """
    if prompt == "-":
        return read()
    given = read() if piped() else ""
    return " ".join(part for part in (given, prompt) if part)


@contextmanager
def _waiting_shown() -> Iterator[None]:
    """Print a note if reading stdin takes more than ``PATIENCE`` seconds, on a terminal."""
    line = "reading stdin; press Ctrl-D to end it, or use < /dev/null for no input"
    timer = Timer(PATIENCE, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()

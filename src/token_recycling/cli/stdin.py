"""Input on stdin: a prompt, or text that the prompt refers to."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import nullcontext

from token_recycling.cli.progress import line_after

PATIENCE = 3.0  # seconds of waiting before a note is printed on a terminal
WAITING = "reading stdin; press Ctrl-D to end it, or use < /dev/null for no input"


def piped() -> bool:
    """Return True if stdin is a file, a pipe or a socket, which end by themselves."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # replaced by an object without a file descriptor
        return not sys.stdin.isatty()
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def read() -> str:
    """Return all of stdin, or "" if it cannot be read."""
    with line_after(PATIENCE, WAITING) if sys.stderr.isatty() else nullcontext():
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

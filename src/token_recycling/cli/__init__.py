"""Command line: one file per subcommand; PyTorch is imported only where a model is needed."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from token_recycling.cli.interrupts import end_at_once
from token_recycling.errors import BAD_INPUT

# Packages of the extra "cli"; the library does not need them.
NEEDED = ("typer", "rich", "jinja2")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; bad input prints one line on stderr and exits with code 2."""
    if argv is None:
        end_at_once()
    try:
        from token_recycling.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        print(
            f"error: the command line needs {error.name}: pip install 'token-recycling[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(BAD_INPUT) from None
    try:
        run(argv)
    except SystemExit as end:
        if argv is not None or not isinstance(end.code, int):
            raise
        _leave(end.code)


def _leave(code: int) -> NoReturn:
    """End this process without freeing what the system frees anyway, which takes a second."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)

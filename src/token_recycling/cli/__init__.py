"""Command line: one file per subcommand; PyTorch is imported only where a model is needed."""

from __future__ import annotations

import sys

from token_recycling.errors import BAD_INPUT

# Packages of the extra "cli"; the library does not need them.
NEEDED = ("typer", "rich", "jinja2")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; bad input prints one line on stderr and exits with code 2."""
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
    run(argv)

"""The command line: one file per verb; PyTorch is imported only when a verb needs a model."""

from __future__ import annotations

import sys

from token_recycling.errors import BAD_INPUT

# What the extra "cli" brings. The library does without them.
NEEDED = ("typer", "rich", "jinja2")


def main(argv: list[str] | None = None) -> None:
    """Run the command line; bad input gives one line on stderr and exit code 2."""
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

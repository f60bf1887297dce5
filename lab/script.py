"""Running a script of this folder: wrong input is one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from token_recycling.errors import BAD_INPUT, TokenRecyclingError


def run(main: Callable[[], object]) -> None:
    """Call ``main``; print a ``TokenRecyclingError`` as one line."""
    try:
        main()
    except TokenRecyclingError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(BAD_INPUT) from None

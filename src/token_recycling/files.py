"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from token_recycling.errors import TokenRecyclingError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary neighbour of ``path``, then rename it to ``path``.

    Raises:
        TokenRecyclingError: the folder is missing or cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise TokenRecyclingError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all.

    Raises:
        TokenRecyclingError: see ``write_atomically``.
    """
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))

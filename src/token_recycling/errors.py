"""The exception for unusable input, and the warning about a fallback to standard decoding."""

from __future__ import annotations

import sys
import unicodedata
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

BAD_INPUT = 2  # exit code of the command line
INTERRUPTED = 130  # exit code: 128 + SIGINT, as in a shell
INSIDE = ("token_recycling.", "skinny_kernels.", "transformers.", "torch.", "contextlib")  # modules


def printable(text: object) -> str:
    """Return ``text`` with control, format and line-separator characters escaped."""
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else character
        for character in str(text)
    )


def unknown_option(name: str, known: Iterable[str]) -> TokenRecyclingError:
    """Return the error about an option that does not exist; it names the most similar one."""
    near = get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return TokenRecyclingError(f"there is no option {printable(name)}{hint}")


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the caller's own code, outside this package and those that call it."""
    level = 1
    frame: Any = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class TokenRecyclingError(ValueError):
    """Unusable input; the one-line message says what is wrong and what to do."""


class GraphError(TokenRecyclingError):
    """The step of this model and drafter cannot be run as a graph here."""


class StepError(GraphError):
    """A step cannot be captured, is wrong, or too slow; another one may do."""


class PlainDecodingWarning(UserWarning):
    """Warns that the model cannot verify draft trees and is decoded one token at a time."""

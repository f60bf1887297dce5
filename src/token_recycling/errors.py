"""The one exception of bad input, and the warning of a model that is decoded plainly."""

from __future__ import annotations

import unicodedata

BAD_INPUT = 2  # exit code of the command line


def one_line(error: object, limit: int | None = None) -> str:
    """Return the text of ``error`` on one line, of ``limit`` characters at most."""
    return " ".join(str(error).split())[:limit]


def printable(text: object) -> str:
    """Return ``text`` with what would steer a terminal, or turn text round, written out."""
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else character
        for character in str(text)
    )


class TokenRecyclingError(ValueError):
    """Input that cannot be used; its text is one line that says what is wrong and what to do."""


class PlainDecodingWarning(UserWarning):
    """The model cannot be verified by tree attention and is decoded one token at a time."""

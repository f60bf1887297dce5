"""The one exception of bad input, and the warning of a model that is decoded plainly."""


def one_line(error: object, limit: int | None = None) -> str:
    """Return the text of ``error`` on one line, of ``limit`` characters at most."""
    return " ".join(str(error).split())[:limit]


class TokenRecyclingError(ValueError):
    """Input that cannot be used; its text is one line that says what is wrong and what to do."""


class PlainDecodingWarning(UserWarning):
    """The model cannot be verified by tree attention and is decoded one token at a time."""

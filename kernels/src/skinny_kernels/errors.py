"""Errors about files, and how errors are reported."""


class CheckpointError(ValueError):
    """A file of weights cannot be used; the one-line message says why, and what to do."""


def one_line(error: object, limit: int | None = None) -> str:
    """Return the text of ``error`` as one line of at most ``limit`` characters."""
    return " ".join(str(error).split())[:limit]

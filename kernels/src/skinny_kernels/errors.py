"""Errors about files."""


class CheckpointError(ValueError):
    """A file of weights cannot be used; the one-line message says why, and what to do."""

"""The one exception of bad input, and the warning of a model that is decoded plainly."""


class TokenRecyclingError(ValueError):
    """Input that cannot be used; its text is one line that says what is wrong and what to do."""


class PlainDecodingWarning(UserWarning):
    """The model cannot be verified by tree attention and is decoded one token at a time."""

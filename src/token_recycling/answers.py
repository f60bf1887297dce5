"""What an answer consists of: as a whole, and token by token."""

from __future__ import annotations

from dataclasses import dataclass

from token_recycling.metrics import Stats


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: without special tokens, and without the stop string that ended it.
        token_ids: all emitted tokens, an end-of-sequence token included.
        finish_reason: "eos", "stop" (a stop string) or "length" (a limit).
        stats: what it took.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats


@dataclass(frozen=True)
class Chunk:
    """One token of a streamed answer.

    Attributes:
        text: what the token adds; empty while a character or a stop string is incomplete.
        token_id: the token.
        from_draft: True when the token was drafted and accepted. The last token of every step
            counts as the target's own.
        finish_reason: set on the last chunk (see ``Generation``).
        stats: set on the last chunk.
    """

    text: str
    token_id: int
    from_draft: bool
    finish_reason: str | None = None
    stats: Stats | None = None

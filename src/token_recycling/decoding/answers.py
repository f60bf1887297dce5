"""The results of generation: a whole answer, or one token of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from token_recycling.decoding.metrics import Stats
from token_recycling.decoding.sequence import Sequence

SHOWN = 60  # characters of a text in its repr


@dataclass(frozen=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the text without special tokens and without the stop string that ended it.
        token_ids: all emitted tokens, including an end-of-sequence token.
        finish_reason: "eos", "stop" (a stop string) or "length" (a limit).
        stats: counts and times of this answer.
        batch_invariant: whether the tokens are certainly those of ``drafter="none"`` (see
            ``TokenRecycling.batch_invariant``).
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    batch_invariant: bool = False

    @classmethod
    def of(cls, sequence: Sequence, tokenizer: Any, batch_invariant: bool) -> Generation:
        """Return the answer of a row that has ended; without a tokenizer (None) it has no text."""
        tokens, text = sequence.new_tokens, ""
        if sequence.text is not None:
            sequence.text.finish()
            text = sequence.text.text
        elif tokenizer is not None:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
        reason = sequence.finish_reason or ""
        return cls(text, tokens, reason, sequence.stats, batch_invariant)

    def __repr__(self) -> str:
        """Show the text, its length, why it ended and its MAT."""
        text = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}…"
        return (
            f"<Generation {text!r}: {len(self.token_ids)} tokens, {self.finish_reason}, "
            f"MAT {self.stats.mat:.2f}>"
        )


@dataclass(frozen=True)
class Chunk:
    """One token of a streamed answer.

    Attributes:
        text: the text that the token adds; empty while a character or a possible stop string is
            incomplete.
        token_id: the token.
        from_draft: True when the token was drafted and accepted. The last token of every step
            counts as the target's own.
        finish_reason: set in the last chunk only (see ``Generation``).
        stats: set in the last chunk only.
    """

    text: str
    token_id: int
    from_draft: bool
    finish_reason: str | None = None
    stats: Stats | None = None

"""One row of a batch: its tokens, its stop rules, its text and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from skinny_kernels.modes import ordinary_tensors
from token_recycling.decoding.metrics import Stats
from token_recycling.decoding.text import TextStream

# Called after every appended token; returns why the row ends with this token, or None.
StopRule = Callable[["Sequence"], "str | None"]
# If several rules end a row at the same token, the earliest reason in this list is reported.
REASONS = ("eos", "stop", "length")


class Sequence:
    """The tokens of one row, their owner: every other copy is derived from these.

    Tokens are added by ``append`` only, one at a time, so stop rules see every token, including
    those in the middle of an accepted path.

    Attributes:
        tokens: prompt and answer, without padding.
        prompt_length: number of prompt tokens.
        cached: number of prompt tokens that the target had read before.
        longest: tokens of prompt and answer at most, as far as known.
        text: the answer's text, or None if it is not needed token by token.
        finish_reason: "eos", "stop" or "length" after the row has ended, else None.
        stats: statistics of the answer.
    """

    def __init__(
        self,
        prompt: Iterable[int],
        rules: Iterable[StopRule] = (),
        *,
        padding: Iterable[int] = (),
        unknown: int = 0,
        text: TextStream | None = None,
        on_append: Callable[[Sequence], None] | None = None,
        given: Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        """Create the row of ``prompt``.

        Args:
            prompt: token ids.
            rules: decide after which token the row ends; all are called for every token.
            padding: ids in front of the prompt, which logits processors and stopping criteria get
                but the model does not read.
            unknown: number of tokens at the beginning of the prompt whose ids are unknown because
                the target read them in an earlier call; processors and criteria do not get them.
            text: gets every new token; a stop string in it ends the row.
            on_append: called after every token, once ``finish_reason`` is set.
            given: padding and prompt as the caller's tensor int64 [1, t], which processors may
                write to.
            longest: tokens of prompt and answer at most, for which a cache may have room at once;
                None: not known.
        """
        self.tokens = list(prompt)
        self.prompt_length = len(self.tokens)
        self.cached, self.longest = 0, longest
        self.rules, self.text, self.on_append = list(rules), text, on_append
        self.finish_reason: str | None = None
        self.stats = Stats()
        self._padding, self._unknown = list(padding), unknown
        # int64 [1, capacity], the first ``_copied`` are set
        self._ids = None if given is None or given.dtype != torch.long else given
        self._copied = 0 if self._ids is None else self._ids.shape[1]

    @property
    def active(self) -> bool:
        """True until the row has ended."""
        return self.finish_reason is None

    @property
    def new_tokens(self) -> list[int]:
        """The answer so far."""
        return self.tokens[self.prompt_length :]

    @property
    def new_length(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def padded_length(self) -> int:
        """Number of tokens in padding, prompt and answer, as stopping criteria count them."""
        return len(self._padding) + len(self.tokens) - self._unknown

    def append(self, token: int) -> str | None:
        """Append a token to the answer; return why the row ends with it, or None."""
        self.tokens.append(token)
        reasons = ["stop"] if self.text is not None and self.text.feed(token) else []
        reasons += [reason for rule in self.rules if (reason := rule(self)) is not None]
        if reasons:
            self.finish_reason = min(reasons, key=REASONS.index)
        if self.on_append is not None:
            self.on_append(self)
        return self.finish_reason

    def ids(self, device: torch.device | str) -> Tensor:
        """Return padding, prompt and answer, int64 [1, t], as a view of a buffer on ``device``."""
        length = self.padded_length
        with ordinary_tensors():
            if self._ids is None or self._ids.shape[1] < length:
                # Twice the size, so that appending rarely reallocates.
                now = torch.tensor([self.as_seen()], dtype=torch.long, device=device)
                self._ids = torch.cat([now, now], dim=1)
            elif self._copied < length:
                new = self.tokens[self._copied - length :]
                self._ids[0, self._copied : length] = torch.tensor(new, device=device)
            self._copied = length
            return self._ids[:, :length].to(device)

    def as_seen(self) -> list[int]:
        """Return padding, prompt and answer with what processors have written to their ids."""
        seen: list[int] = [] if self._ids is None else self._ids[0, : self._copied].tolist()
        padded = self._padding + self.tokens[self._unknown :]
        return seen + padded[len(seen) :]


def at_most(limit: int) -> StopRule:
    """Return the rule that ends a row after ``limit`` new tokens."""
    return lambda row: "length" if row.new_length >= limit else None


def at_token(ids: Collection[int]) -> StopRule:
    """Return the rule that ends a row with one of ``ids``."""
    known = frozenset(ids)
    return lambda row: "eos" if row.tokens[-1] in known else None

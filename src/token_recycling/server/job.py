"""One answer that the engine is asked for, and what it reports of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from torch import Tensor

from token_recycling.decoding.metrics import Stats
from token_recycling.hf.call import CallOptions
from token_recycling.server.errors import ApiError
from token_recycling.server.grammar import GrammarProcessor
from token_recycling.server.response_template import TemplateParser
from token_recycling.server.tools import CallParser

AnswerParser = CallParser | TemplateParser
# The log probability of a generated token; the most likely tokens with theirs, best first.
TokenLogprobs = tuple[float, list[tuple[int, float]]]


@dataclass(frozen=True)
class NewTokens:
    """Tokens of an answer, as they are accepted.

    Attributes:
        tokens: the tokens, one or more.
        pieces: the text that each adds; "" while a character or a stop string is incomplete.
        drafted: whether each was drafted.
        logprobs: log probabilities of each, if asked for.
        cached: prompt tokens that were not read again.
    """

    tokens: list[int]
    pieces: list[str]
    drafted: list[bool]
    logprobs: list[TokenLogprobs] | None
    cached: int


@dataclass(frozen=True)
class Ended:
    """The end of an answer.

    Attributes:
        reason: "eos", "stop" or "length".
        stats: counts and times.
    """

    reason: str
    stats: Stats


# An error: the answer cannot be given.
Event = NewTokens | Ended | ApiError


@dataclass(frozen=True)
class Answer:
    """What one choice of a request is made from.

    Attributes:
        prompt: its tokens.
        options: of the decoding loop.
        processors: options of ``generate`` that create logits processors.
        grammar: that of them which makes it follow a grammar, if any.
        parser: finds reasoning and calls of tools in its text.
    """

    prompt: list[int]
    options: CallOptions
    processors: dict[str, Any]
    grammar: GrammarProcessor | None = None
    parser: AnswerParser | None = None


@dataclass(eq=False)
class Job:
    """An answer that is to be decoded.

    Attributes:
        answer: what is decoded.
        key: whose texts it belongs to (see ``MatrixScopes``).
        caller: with whom it waits in turn (see ``Authentication``).
        emit: called with every event, in the engine's thread; the last is the end or an error.
        top_logprobs: how many log probabilities per token; None: none at all.
        aborted: set to end it within a step; no more events follow.
        arrived: ``monotonic()`` seconds.
    """

    answer: Answer
    key: str
    caller: str
    emit: Callable[[Event], None]
    top_logprobs: int | None = None
    aborted: bool = False
    arrived: float = field(default_factory=monotonic)


class LogprobRecorder:
    """Notes the log probabilities of the chosen tokens, before penalties and temperature."""

    def __init__(self, top: int) -> None:
        """Note the ``top`` best of every position."""
        self._top = top
        self._rows: list[Tensor] = []

    def __call__(self, row: int, logits: Tensor, scores: Tensor) -> None:
        """Note a choice; called by ``FollowAcceptor`` before the token is known."""
        self._rows.append(logits[0].log_softmax(dim=-1))

    def take(self, tokens: list[int]) -> list[TokenLogprobs]:
        """Return what was noted for ``tokens``, the ones chosen since the last call."""
        rows, self._rows = self._rows, []
        entries = []
        for token, row in zip(tokens, rows, strict=True):
            values, ids = row.topk(min(self._top, len(row)))
            entries.append((float(row[token]), list(zip(ids.tolist(), values.tolist()))))
        return entries

"""Events of the engine as the JSON of OpenAI's answers."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from token_recycling.decoding.metrics import Stats
from token_recycling.server.job import Ended, NewTokens, TokenLogprobs
from token_recycling.server.tools import AnswerParser, Parsed, ToolCall

Json = dict[str, Any]


@dataclass
class Usage:
    """The tokens of all choices of a request.

    Attributes:
        prompt: tokens of the prompts, each counted once.
        cached: those that were not read again.
    """

    prompt: int
    cached: int = 0
    stats: list[Stats] = field(default_factory=list)

    def json(self) -> Json:
        """Return OpenAI's ``usage``."""
        completion = sum(stats.new_tokens for stats in self.stats)
        accepted = sum(stats.accepted for stats in self.stats)
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": completion,
            "total_tokens": self.prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min(self.cached, self.prompt)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(stats.drafted for stats in self.stats) - accepted,
            },
        }


class TokenTexts:
    """The texts of single tokens, for log probabilities."""

    def __init__(self, tokenizer: Any, eos: list[int]) -> None:
        """Decode with ``tokenizer``; tokens in ``eos`` belong to no text."""
        self._tokenizer, self._eos = tokenizer, frozenset(eos)

    def text(self, token: int) -> str:
        """Return the text of a token on its own."""
        text: str = self._tokenizer.decode([token])
        return text

    def entries(self, event: NewTokens) -> list[tuple[int, TokenLogprobs]]:
        """Return the tokens of an event that belong to the text, with their log probabilities."""
        return [
            (token, logprobs)
            for token, logprobs in zip(event.tokens, event.logprobs or [])
            if token not in self._eos
        ]

    def chat(self, event: NewTokens) -> Json | None:
        """Return the ``logprobs`` of a chat answer."""
        if event.logprobs is None:
            return None

        def entry(token: int, logprob: float) -> Json:
            text = self.text(token)
            is_complete = "\ufffd" not in text  # else part of a character
            return {
                "token": text,
                "logprob": max(logprob, -9999.0),
                "bytes": list(text.encode()) if is_complete else None,
            }

        return {
            "content": [
                {
                    **entry(token, logprobs.logprob),
                    "top_logprobs": [entry(*alternative) for alternative in logprobs.top],
                }
                for token, logprobs in self.entries(event)
            ],
            "refusal": None,
        }

    def completion(self, event: NewTokens, begin: int) -> Json | None:
        """Return the ``logprobs`` of a completion whose text so far has ``begin`` characters."""
        if event.logprobs is None:
            return None
        entries = self.entries(event)
        offsets, at = [], begin
        for piece in event.pieces[: len(entries)]:
            offsets.append(at)
            at += len(piece)
        return {
            "tokens": [self.text(token) for token, _ in entries],
            "token_logprobs": [max(logprobs.logprob, -9999.0) for _, logprobs in entries],
            "top_logprobs": [
                {self.text(token): max(value, -9999.0) for token, value in logprobs.top}
                for _, logprobs in entries
            ],
            "text_offset": offsets,
        }


def drafts(event: NewTokens) -> list[list[Any]]:
    """Return [text, drafted] of each token, for ``include_drafts``."""
    return [[piece, drafted] for piece, drafted in zip(event.pieces, event.drafted)]


class ChatChoice:
    """One choice of a chat answer.

    Attributes:
        index: of the choice.
        content: its text so far.
        reasoning: what the model has written for itself so far.
        calls: its calls so far.
    """

    def __init__(self, index: int, texts: TokenTexts, parser: AnswerParser | None) -> None:
        """Start; ``parser`` finds reasoning and calls in the text."""
        self.index, self._texts, self._parser = index, texts, parser
        self.content = self.reasoning = ""
        self.calls: list[ToolCall] = []
        self._logprobs: list[Json] | None = None
        self._reason: str | None = None

    def first_chunk(self) -> Json:
        """Return the chunk that begins a stream."""
        return self._chunk({"role": "assistant", "content": ""})

    def chunk(self, event: NewTokens) -> Json | None:
        """Take new tokens; return them as a chunk, or None if there is nothing to send yet."""
        delta = self._take("".join(event.pieces))
        logprobs = self._texts.chat(event)
        if logprobs is not None:
            self._logprobs = (self._logprobs or []) + logprobs["content"]
        if not delta and not logprobs:
            return None
        return self._chunk(delta or {"content": ""}, logprobs)

    def last_chunk(self, event: Ended) -> Json:
        """Take the end; return it as a chunk."""
        delta = self._take("", last=True)
        self._reason = "tool_calls" if self.calls else "stop"
        if event.reason == "length":
            self._reason = "length"
        return self._chunk(delta, reason=self._reason)

    def _take(self, text: str, *, last: bool = False) -> Json:
        new = Parsed(text) if self._parser is None else self._parser.feed(text, last=last)
        delta: Json = {}
        if new.reasoning:
            delta["reasoning_content"] = new.reasoning
        if new.content:
            delta["content"] = new.content
        if new.calls:
            first = len(self.calls)
            delta["tool_calls"] = [
                {"index": first + at, **_call(call)} for at, call in enumerate(new.calls)
            ]
        self.content += new.content
        self.reasoning += new.reasoning
        self.calls += new.calls
        return delta

    def _chunk(self, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def whole(self) -> Json:
        """Return the finished choice."""
        message: Json = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [_call(call) for call in self.calls]
        logprobs = None
        if self._logprobs is not None:
            logprobs = {"content": self._logprobs, "refusal": None}
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason,
        }


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class TextChoice:
    """One choice of a completion; the same methods as ``ChatChoice``."""

    def __init__(self, index: int, texts: TokenTexts) -> None:
        """Start."""
        self.index, self._texts = index, texts
        self.content = ""
        self._logprobs: Json | None = None
        self._reason: str | None = None

    def first_chunk(self) -> Json | None:
        """Return None: completions have no role."""
        return None

    def chunk(self, event: NewTokens) -> Json | None:
        """Take new tokens; return them as a chunk, or None if there is nothing to send yet."""
        text, logprobs = "".join(event.pieces), self._texts.completion(event, len(self.content))
        self.content += text
        if logprobs is not None:
            before = self._logprobs or {name: [] for name in logprobs}
            self._logprobs = {name: before[name] + values for name, values in logprobs.items()}
        return self._json(text, logprobs) if text or logprobs else None

    def last_chunk(self, event: Ended) -> Json:
        """Take the end; return it as a chunk."""
        self._reason = "length" if event.reason == "length" else "stop"
        return self._json("", None)

    def _json(self, text: str, logprobs: Json | None) -> Json:
        return {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._reason,
        }

    def whole(self) -> Json:
        """Return the finished choice."""
        return self._json(self.content, self._logprobs)


@dataclass(frozen=True)
class Envelope:
    """What all chunks of an answer have in common."""

    object: str
    prefix: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:24])

    def json(self, choices: list[Json], **others: Any) -> Json:
        """Return an answer, or a chunk of one."""
        return {
            "id": f"{self.prefix}-{self.key}",
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **others,
        }

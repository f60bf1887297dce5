"""Events of the engine as the JSON of OpenAI's answers."""

from __future__ import annotations

from typing import Any

from token_recycling.server.job import AnswerParser, Ended, NewTokens, TokenLogprobs
from token_recycling.server.tools import Json, Parsed

LEAST_LOGPROB = -9999.0  # -inf is no JSON


class TokenTexts:
    """The texts of single tokens, for log probabilities."""

    def __init__(self, tokenizer: Any, eos: list[int]) -> None:
        """Decode with ``tokenizer``; tokens in ``eos`` belong to no text."""
        self._tokenizer, self._eos = tokenizer, frozenset(eos)

    def _text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text

    def _entries(self, event: NewTokens) -> list[tuple[int, TokenLogprobs]]:
        """Return the tokens of an event that belong to the text, with their log probabilities."""
        pairs = zip(event.tokens, event.logprobs or [])
        return [(token, logprobs) for token, logprobs in pairs if token not in self._eos]

    def _entry(self, token: int, logprob: float) -> Json:
        text = self._text(token)
        is_complete = "\ufffd" not in text  # else part of a character
        return {
            "token": text,
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(text.encode()) if is_complete else None,
        }

    def chat(self, event: NewTokens) -> list[Json]:
        """Return the ``logprobs.content`` of a chat answer."""
        return [
            {
                **self._entry(token, logprob),
                "top_logprobs": [self._entry(*alternative) for alternative in top],
            }
            for token, (logprob, top) in self._entries(event)
        ]

    def completion(self, event: NewTokens, begin: int) -> Json:
        """Return the ``logprobs`` of a completion whose text so far has ``begin`` characters."""
        entries = self._entries(event)
        offsets, at = [], begin
        for piece in event.pieces[: len(entries)]:
            offsets.append(at)
            at += len(piece)
        return {
            "tokens": [self._text(token) for token, _ in entries],
            "token_logprobs": [max(logprob, LEAST_LOGPROB) for _, (logprob, _) in entries],
            "top_logprobs": [
                {self._text(token): max(value, LEAST_LOGPROB) for token, value in top}
                for _, (_, top) in entries
            ],
            "text_offset": offsets,
        }


class ChatChoice:
    """One choice of a chat answer."""

    def __init__(self, index: int, texts: TokenTexts, parser: AnswerParser | None) -> None:
        """Start; ``parser`` finds reasoning and calls in the text."""
        self._index, self._texts, self._parser = index, texts, parser
        self._content = self._reasoning = ""
        self._calls: list[Json] = []
        self._logprobs: list[Json] | None = None
        self._reason: str | None = None

    def first_chunk(self) -> Json | None:
        """Return the chunk that begins a stream."""
        return self._json("delta", {"role": "assistant", "content": ""}, None)

    def chunk(self, event: NewTokens | Ended) -> Json | None:
        """Take an event; return it as a chunk, or None if there is nothing to send yet."""
        if isinstance(event, Ended):
            delta = self._take("", last=True)
            self._reason = "tool_calls" if self._calls else "stop"
            if event.reason == "length":
                self._reason = "length"
            return self._json("delta", delta, None)
        delta, logprobs = self._take("".join(event.pieces)), None
        if event.logprobs is not None:
            logprobs = self._texts.chat(event)
            self._logprobs = (self._logprobs or []) + logprobs
        elif not delta:
            return None
        return self._json("delta", delta or {"content": ""}, logprobs)

    def _take(self, text: str, *, last: bool = False) -> Json:
        new = Parsed(text) if self._parser is None else self._parser.feed(text, last=last)
        first = len(self._calls)
        self._content += new.content
        self._reasoning += new.reasoning
        self._calls += new.calls
        delta = {
            "reasoning_content": new.reasoning,
            "content": new.content,
            "tool_calls": [{"index": first + at, **call} for at, call in enumerate(new.calls)],
        }
        return {name: value for name, value in delta.items() if value}

    def _json(self, name: str, said: Json, logprobs: list[Json] | None) -> Json:
        return {
            "index": self._index,
            name: said,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": self._reason,
        }

    def whole(self) -> Json:
        """Return the finished choice."""
        message: Json = {"role": "assistant", "content": self._content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["content"] = self._content or None
            message["tool_calls"] = self._calls
        return self._json("message", message, self._logprobs)


class TextChoice:
    """One choice of a completion; the same methods as ``ChatChoice``."""

    def __init__(self, index: int, texts: TokenTexts) -> None:
        """Start."""
        self._index, self._texts = index, texts
        self._content = ""
        self._logprobs: Json | None = None
        self._reason: str | None = None

    def first_chunk(self) -> Json | None:
        """Return None: completions have no role."""
        return None

    def chunk(self, event: NewTokens | Ended) -> Json | None:
        """Take an event; return it as a chunk, or None if there is nothing to send yet."""
        if isinstance(event, Ended):
            self._reason = "length" if event.reason == "length" else "stop"
            return self._json("", None)
        text, logprobs = "".join(event.pieces), None
        if event.logprobs is not None:
            logprobs = self._texts.completion(event, len(self._content))
            before = self._logprobs or {name: [] for name in logprobs}
            self._logprobs = {name: before[name] + values for name, values in logprobs.items()}
        self._content += text
        return self._json(text, logprobs) if text or logprobs else None

    def _json(self, text: str, logprobs: Json | None) -> Json:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": self._reason,
        }

    def whole(self) -> Json:
        """Return the finished choice."""
        return self._json(self._content, self._logprobs)

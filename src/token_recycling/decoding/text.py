"""Encoding of prompts and incremental decoding of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from token_recycling.errors import TokenRecyclingError

Message = dict[str, str]
# A string, a conversation, or token ids.
Prompt = str | list[Message] | list[int]
Batch = list[str] | list[list[Message]] | list[list[int]] | list[Prompt] | tuple[Prompt, ...]


def is_batch(prompt: Any) -> bool:
    """Return True for a list of prompts, False for a single prompt.

    A list of messages (dicts) or of token ids is a single prompt.
    """
    return isinstance(prompt, list | tuple) and not (
        prompt and all(isinstance(part, dict | int) for part in prompt)
    )


def as_conversation(tokenizer: Any, turns: Sequence[str], raw: bool = False) -> Prompt:
    """Convert ``turns``, alternating between user and model, into a list of messages.

    Without a chat template, or with ``raw``, they are joined into one string.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(turns)
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Convert a prompt to token ids: a string directly, messages through the chat template.

    Raises:
        TokenRecyclingError: the tokenizer or chat template that this needs is missing, or the
            prompt has another type.
    """
    if isinstance(prompt, list):
        tokens = [part for part in prompt if isinstance(part, int) and type(part) is not bool]
        if len(tokens) == len(prompt):
            return tokens
    if tokenizer is None:
        raise TokenRecyclingError("without a tokenizer a prompt must be a list of token ids")
    ids: list[int]
    if isinstance(prompt, str):
        ids = tokenizer(valid_text(prompt)).input_ids
    elif isinstance(prompt, list) and all(isinstance(part, dict) for part in prompt):
        ids = tokenizer(valid_text(render(tokenizer, prompt)), add_special_tokens=False).input_ids
    else:
        raise TokenRecyclingError(
            "a prompt must be a string, a list of messages or a list of token ids"
        )
    return ids


def valid_text(text: str) -> str:
    """Return ``text``, or raise if it contains surrogates (from undecodable input).

    Raises:
        TokenRecyclingError: ``text`` cannot be encoded as UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenRecyclingError("the prompt is not valid UTF-8 text") from error
    return text


def render(tokenizer: Any, messages: Any, variables: dict[str, Any] | None = None) -> str:
    """Render a conversation with the chat template.

    Args:
        tokenizer: has the template.
        messages: the conversation.
        variables: of the template, such as ``tools``.

    Raises:
        TokenRecyclingError: there is no chat template, or it rejects the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise TokenRecyclingError("this model has no chat template; give the prompt as text")
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **(variables or {})
        )
    except Exception as error:  # jinja errors, or anything that the template raises
        raise TokenRecyclingError(f"the chat template rejects the messages: {error}") from error
    return text


class TextStream:
    """The text of a row, decoded token by token, up to the first stop string.

    A token may end inside a character, and a stop string may span several tokens. Text that may
    still change or be part of a stop string is kept pending.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), *, special_tokens: bool = False
    ) -> None:
        """Decode with ``tokenizer`` (None: no text) up to the first of the strings ``stop``.

        The text contains special tokens only with ``special_tokens``.
        """
        self.tokenizer, self.stop, self._special = tokenizer, tuple(stop), special_tokens
        self.pieces: list[str] = []  # the text that each token added
        self._pending = ""  # decoded, but possibly the beginning of a stop string
        self._ids: list[int] = []
        # Tokens before _read are decoded; those from _begin on are context for the next ones.
        self._begin = self._read = 0
        self._before = ""  # text of the tokens from _begin to _read
        self._ended = False

    def _decode(self, begin: int) -> str:
        text: str = self.tokenizer.decode(self._ids[begin:], skip_special_tokens=not self._special)
        return text

    def feed(self, token: int) -> bool:
        """Add a token; return True when the text ends with it."""
        self.pieces.append("")
        if self.tokenizer is None or self._ended:
            return self._ended
        self._ids.append(token)
        # Decode with some preceding tokens: a token's text may depend on the one before.
        text = self._decode(self._begin)
        if text.endswith("\ufffd"):  # incomplete character
            return False
        new = text[len(self._before) :]
        self._before = text
        if recent := self._decode(self._read):  # empty for special tokens, which give no context
            self._begin, self._before = self._read, recent
        self._read = len(self._ids)
        self._release(new)
        return self._ended

    def _release(self, new: str) -> None:
        text = self._pending + new
        positions = [at for s in self.stop if (at := text.find(s)) >= 0]
        if positions:
            self._ended = True
            self.pieces[-1], self._pending = text[: min(positions)], ""
            return
        pending = max((_overlap(text, s) for s in self.stop), default=0)
        self._pending = text[len(text) - pending :]
        self.pieces[-1] = text[: len(text) - pending]

    def finish(self) -> None:
        """Add all pending text to the last piece, as no more tokens follow."""
        if self.tokenizer is not None and self.pieces and not self._ended:
            self.pieces[-1] += self._pending + self._decode(self._begin)[len(self._before) :]
            self._ended = True

    @property
    def text(self) -> str:
        """The text so far, without pending text; complete after ``finish``."""
        return "".join(self.pieces)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0

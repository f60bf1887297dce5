"""From prompts to tokens, and from tokens to text as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from token_recycling.errors import TokenRecyclingError

Message = dict[str, str]
# Text as it is, a conversation, or token ids.
Prompt = str | list[Message] | list[int]


def is_batch(prompt: Any) -> bool:
    """True for a list of prompts, False for a single one.

    A list of messages (dicts) and a list of token ids are single prompts.
    """
    return isinstance(prompt, list | tuple) and not (
        prompt and all(isinstance(part, dict | int) for part in prompt)
    )


def as_conversation(tokenizer: Any, turns: Sequence[str], raw: bool = False) -> Prompt:
    """Make messages of ``turns``, the user's and the model's in turn.

    Without a chat template, or with ``raw``, they become one text.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        return "\n\n".join(turns)
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Turn a prompt into token ids: text as it is, messages through the chat template.

    Raises:
        TokenRecyclingError: there is no tokenizer or chat template to do it with, or the prompt
            is of no known kind.
    """
    if isinstance(prompt, list) and all(isinstance(part, int) for part in prompt):
        return [part for part in prompt if isinstance(part, int)]
    if tokenizer is None:
        raise TokenRecyclingError("without a tokenizer a prompt must be a list of token ids")
    ids: list[int]
    if isinstance(prompt, str):
        ids = tokenizer(valid_text(prompt)).input_ids
    elif isinstance(prompt, list) and all(isinstance(part, dict) for part in prompt):
        ids = tokenizer(valid_text(render(tokenizer, prompt)), add_special_tokens=False).input_ids
    else:
        raise TokenRecyclingError("a prompt is a text, a list of messages, or a list of token ids")
    return ids


def valid_text(text: str) -> str:
    """Refuse what stands for bytes that are no text (undecodable input)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenRecyclingError("the prompt is no valid UTF-8 text") from error
    return text


def render(tokenizer: Any, messages: Any) -> str:
    """Put a conversation through the chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise TokenRecyclingError("this model has no chat template; give the prompt as text")
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # jinja's errors, and whatever a template raises itself
        raise TokenRecyclingError(f"the chat template refuses the messages: {error}") from error
    return text


class TextStream:
    """A row's text, token by token, ending in front of the first stop string.

    A token's bytes need not be whole characters, and a stop string may be spread over several
    tokens: text that could still change or turn out to be a stop string is held back.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        """Read with ``tokenizer`` (None: there is no text) up to one of the strings ``stop``."""
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.pieces: list[str] = []  # what each token added to the text
        self._pending = ""  # decoded, perhaps the beginning of a stop string
        self._ids: list[int] = []
        self._begin = self._read = 0  # tokens before _begin matter no more; before _read are read
        self._before = ""  # the text of the tokens from _begin to _read
        self._ended = False

    def _decode(self, begin: int) -> str:
        text: str = self.tokenizer.decode(self._ids[begin:], skip_special_tokens=True)
        return text

    def feed(self, token: int) -> bool:
        """Take one more token; True when the text ends with it."""
        self.pieces.append("")
        if self.tokenizer is None or self._ended:
            return self._ended
        self._ids.append(token)
        # A few tokens of context in front: a tokenizer may join a token to the one before.
        whole = self._decode(self._begin)
        if whole.endswith("\ufffd"):  # the bytes of a character are not complete
            return False
        new = whole[len(self._before) :]
        self._before = whole
        if recent := self._decode(self._read):  # special tokens are no context
            self._begin, self._before = self._read, recent
        self._read = len(self._ids)
        self._release(new)
        return self._ended

    def _release(self, new: str) -> None:
        text = self._pending + new
        found = [at for s in self.stop if (at := text.find(s)) >= 0]
        if found:
            self._ended = True
            self.pieces[-1], self._pending = text[: min(found)], ""
            return
        pending = max((_overlap(text, s) for s in self.stop), default=0)
        self._pending = text[len(text) - pending :]
        self.pieces[-1] = text[: len(text) - pending]

    def finish(self) -> None:
        """Add to the last piece what was held back: no more tokens come."""
        if self.tokenizer is not None and self.pieces and not self._ended:
            self.pieces[-1] += self._pending + self._decode(self._begin)[len(self._before) :]
            self._ended = True

    @property
    def text(self) -> str:
        """The text so far; all of it after ``finish``."""
        return "".join(self.pieces)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest ending of ``text`` that begins ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0

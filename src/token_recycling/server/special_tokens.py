"""Special tokens in the texts of callers, which must not begin or end a turn."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any


class SpecialTokens:
    """Keeps a tokenizer's special tokens apart from texts that only look like them.

    A chat template joins its own special tokens and the texts of callers to one text. So a caller's
    special tokens are replaced by marks before, and encoded as ordinary text after.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Find the special tokens of ``tokenizer``."""
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        template = str(getattr(tokenizer, "chat_template", ""))
        texts = {
            str(token) for token in added if token.special or _begins_turn(str(token), template)
        }
        texts |= set(tokenizer.all_special_tokens)
        alternatives = "|".join(map(re.escape, sorted(texts - {""}, key=len, reverse=True)))
        self._pattern = re.compile(alternatives or r"(?!)")  # the latter is found nowhere

    def first(self, text: str) -> str | None:
        """Return the first special token in ``text``, or None."""
        match = self._pattern.search(text)
        return None if match is None else match[0]

    def marked(self, value: Any) -> tuple[Any, Marks]:
        """Return JSON with marks in place of special tokens in its strings, and the marks."""
        marks, pattern = Marks(), self._pattern

        def replace(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda match: marks.of(match[0]), value)
            if isinstance(value, dict):
                return {replace(key): replace(item) for key, item in value.items()}
            if isinstance(value, list):
                return [replace(item) for item in value]
            return value

        return replace(value), marks


def _begins_turn(token: str, template: str) -> bool:
    """Return whether a token that is not declared special is one by the template's use of it."""
    return ("|" in token or "｜" in token) and token in template


class Marks:
    """Marks that stand for special tokens in texts of callers.

    They consist of letters and digits, which templates and JSON leave as they are, and cannot be
    guessed.
    """

    def __init__(self) -> None:
        """Make the marks of one request."""
        self._key = secrets.token_hex(16)
        self._texts: list[str] = []

    def of(self, text: str) -> str:
        """Return a mark for ``text``."""
        self._texts.append(text)
        return f"x{self._key}x{len(self._texts) - 1}x"

    def _parts(self, text: str) -> list[str]:
        """Return ordinary texts and the numbers of marks in turn, beginning with a text."""
        return re.split(f"x{self._key}x([0-9]+)x", text)

    def text(self, text: str) -> str:
        """Return ``text`` with what its marks stand for."""
        parts = self._parts(text)
        parts[1::2] = [self._texts[int(number)] for number in parts[1::2]]
        return "".join(parts)

    def ids(self, text: str, tokenizer: Callable[..., Any]) -> list[int]:
        """Return the tokens of ``text``; what a mark stands for is encoded as ordinary text."""
        parts = self._parts(text)
        ordinary = list(dict.fromkeys(part for part in parts[::2] if part))
        # In one call for all: a call takes 0.1 ms, and there may be tens of thousands.
        encoded = tokenizer(ordinary, add_special_tokens=False).input_ids if ordinary else []
        of_text = dict(zip(ordinary, encoded))
        of_mark = {
            text: tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
            for text in set(self._texts)
        }
        ids: list[int] = []
        for index, part in enumerate(parts):
            if part:
                ids += of_mark[self._texts[int(part)]] if index % 2 else of_text[part]
        return ids

    def count(self, text: str) -> int:
        """Return how many marks are in ``text``."""
        return text.count(f"x{self._key}x")

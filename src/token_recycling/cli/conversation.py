"""Chat turns, as messages and as the tokens that the model has read and written."""

from __future__ import annotations

from typing import Any

from token_recycling.decoding.text import Message, render, valid_text


class Conversation:
    """A chat that keeps its tokens, so that no turn has to be prefilled twice.

    For each question the chat template is rendered again. The new text starts with the previous
    conversation, but its tokens may differ: the tokenizer may split the model's answer differently
    than the model wrote it, and everything after that point would have to be prefilled again.
    Therefore the known beginning is matched as text, and keeps the tokens that were read and
    written.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        """Start with a ``system`` message, if given."""
        self.tokenizer = tokenizer
        self._opening: list[Message] = []
        if system:
            self._opening.append({"role": "system", "content": system})
        self.clear()

    def clear(self) -> None:
        """Remove all turns."""
        self._turns: list[tuple[Message, Message]] = []
        self._text, self._ids = "", list[int]()  # of the known beginning of the rendered text
        self._prompt = self._text, self._ids  # text and tokens of the last prompt

    def _asked(self, question: str, begin: int = 0) -> list[Message]:
        said = [message for turn in self._turns[begin:] for message in turn]
        return [*self._opening, *said, {"role": "user", "content": question}]

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of the conversation followed by ``question``; keep them for its answer.

        Raises:
            TokenRecyclingError: the template rejects the conversation, or it is not valid text.
        """
        text = valid_text(render(self.tokenizer, self._asked(question)))
        ids = going_on(self.tokenizer, text, self._text, self._ids)
        self._prompt = text, ids
        return ids

    def answered(self, question: str, answer: str, tokens: list[int]) -> None:
        """Add a turn: the model's ``answer`` to the last ``prompt``, and its ``tokens``."""
        text, ids = self._prompt
        special = set(self.tokenizer.all_special_ids)
        written = list(tokens)
        while written and written[-1] in special:  # end tokens; the template adds its own
            written.pop()
        is_complete = self.tokenizer.decode(written, skip_special_tokens=True) == answer
        if is_complete:  # not if the text was cut before a stop string
            self._text, self._ids = text + answer, ids + written
        said = {"role": "assistant", "content": answer}
        self._turns.append(({"role": "user", "content": question}, said))

    def shorten(self, question: str, most: int) -> int:
        """Drop the oldest turns if the prompt of ``question`` has more than ``most`` tokens.

        The rest fits into half of that. Each time turns are dropped, the whole prompt has to be
        prefilled again, so this must not happen on every turn.

        Returns:
            Number of dropped turns; 0 if even the question alone is too long.
        """
        if len(self.prompt(question)) <= most:
            return 0
        for count in range(1, len(self._turns) + 1):
            text = render(self.tokenizer, self._asked(question, count))
            length = len(going_on(self.tokenizer, text, "", []))
            if length <= most // 2 or (count == len(self._turns) and length <= most):
                del self._turns[:count]
                self._text, self._ids = "", []
                return count
        return 0


def going_on(tokenizer: Any, text: str, known: str, ids: list[int]) -> list[int]:
    """Return the tokens of ``text``: ``ids`` for its beginning ``known``, and those of the rest.

    The rest is tokenized as part of the whole text. If ``text`` does not begin with ``known``, a
    token spans the boundary, or the tokenizer has no offsets, the whole text is tokenized.
    """
    if not (ids and text.startswith(known) and getattr(tokenizer, "is_fast", False)):
        tokens: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return tokens
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for index, (begin, end) in enumerate(encoding.offset_mapping):
        if begin >= len(known):
            return ids + list(encoding.input_ids[index:])
        if end > len(known):
            break
    return list(encoding.input_ids)

"""The turns of a chat, as messages and as the tokens that the model has read and written."""

from __future__ import annotations

from typing import Any

from token_recycling.text import Message, readable, render


class Conversation:
    """A chat of which the tokens are kept, so that no turn is read twice.

    Between an answer and the next question the template is rendered anew. Its text begins with
    what was said, but its tokens may not: the model may have written "Hello" as another token than
    the tokenizer makes of it behind the template's last space, and all that follows would have to
    be read again. So the beginning is recognised by its text, and its tokens stay those that were
    read and written.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        """Begin with a ``system`` message, if given."""
        self.tokenizer = tokenizer
        self._opening: list[Message] = []
        if system:
            self._opening.append({"role": "system", "content": system})
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._turns: list[tuple[Message, Message]] = []
        self._text, self._ids = "", list[int]()  # of the beginning of what is rendered
        self._prompt = self._text, self._ids  # the last one

    def _asked(self, question: str) -> list[Message]:
        said = [message for turn in self._turns for message in turn]
        return [*self._opening, *said, {"role": "user", "content": question}]

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of the conversation with ``question`` at its end.

        Raises:
            TokenRecyclingError: the template refuses it, or it is no text.
        """
        text = readable(render(self.tokenizer, self._asked(question)))
        ids = going_on(self.tokenizer, text, self._text, self._ids)
        self._prompt = text, ids
        return ids

    def answered(self, question: str, answer: str, tokens: list[int]) -> None:
        """Take what the model wrote to the last ``prompt``: ``tokens``, and their text."""
        text, ids = self._prompt
        special = set(self.tokenizer.all_special_ids)
        written = list(tokens)
        while written and written[-1] in special:  # the end; templates have their own
            written.pop()
        whole = self.tokenizer.decode(written, skip_special_tokens=True) == answer
        if whole:  # a text that was cut in front of a stop string is not what was written
            self._text, self._ids = text + answer, ids + written
        said = {"role": "assistant", "content": answer}
        self._turns.append(({"role": "user", "content": question}, said))

    def drop_oldest(self) -> bool:
        """Leave out the oldest turn; False when there is none."""
        if not self._turns:
            return False
        del self._turns[0]
        self._text, self._ids = "", []
        return True


def going_on(tokenizer: Any, text: str, known: str, ids: list[int]) -> list[int]:
    """Return the tokens of ``text``: ``ids`` where it begins with ``known``, and the rest of it.

    The rest are the tokens that it has within the whole text. Where a token lies across the seam,
    or the tokenizer does not say which token stands where, all tokens are the tokenizer's.
    """
    if not (ids and text.startswith(known) and getattr(tokenizer, "is_fast", False)):
        whole: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return whole
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for index, (begin, end) in enumerate(found.offset_mapping):
        if begin >= len(known):
            return ids + list(found.input_ids[index:])
        if end > len(known):
            break
    return list(found.input_ids)

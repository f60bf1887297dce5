"""The turns of a chat, as messages and as the tokens that the model has read and written."""

from __future__ import annotations

from typing import Any

from token_recycling.text import Message, render, valid_text


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

    def _asked(self, question: str, begin: int = 0) -> list[Message]:
        said = [message for turn in self._turns[begin:] for message in turn]
        return [*self._opening, *said, {"role": "user", "content": question}]

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of the conversation with ``question`` at its end.

        Raises:
            TokenRecyclingError: the template refuses it, or it is no text.
        """
        text = valid_text(render(self.tokenizer, self._asked(question)))
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

    def shorten(self, question: str, most: int) -> int:
        """Leave out the oldest turns if the prompt of ``question`` has more than ``most`` tokens.

        What is left takes half of that, so that not every turn begins with another first one: all
        of the prompt has to be read anew then.

        Returns:
            FairLock left out; none where the question is too long even alone.
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

"""Tool calls: their format in the chat template, and parsing them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

BEGIN, END = "<tool_call>", "</tool_call>"


Json = dict[str, Any]


class Parsed(NamedTuple):
    """What a parser has made of new text.

    Attributes:
        content: of the answer.
        calls: those that are complete with it, as OpenAI's ``tool_calls``.
        reasoning: text that the model has written for itself.
    """

    content: str
    calls: Sequence[Json] = ()
    reasoning: str = ""


def takes_tools(tokenizer: Any) -> bool:
    """Return True if the chat template writes tools and calls in the format that is read here.

    The format is that of Hermes and Qwen: ``<tool_call>``, an object with ``name`` and
    ``arguments``, ``</tool_call>``.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use") or template.get("default")
    if not template or BEGIN not in template or "tools" not in template:
        return False
    ids = tokenizer(f"{BEGIN} {END}", add_special_tokens=False).input_ids
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return BEGIN in text and END in text  # special tokens would be missing in the text


class CallParser:
    """Divides the text of an answer into content and calls, as it comes.

    White space in front of a call and after it belongs to the format.

    Attributes:
        special_tokens: True if the text must contain special tokens.
    """

    special_tokens = False

    def __init__(self) -> None:
        """Start before the first character."""
        self._text = ""  # what may still become a call, with the white space in front of it
        self._after_call = self._called = False

    def feed(self, piece: str, *, last: bool = False) -> Parsed:
        """Add text; return what it completes.

        Args:
            piece: the text.
            last: no more text follows; a call that is incomplete counts as content, and is dropped
                if there were calls before it.
        """
        self._text += piece
        content, calls = "", []
        while True:
            if self._after_call:
                self._text = self._text.lstrip()
            content += self._take(len(self._text[: _call_begin(self._text)].rstrip()))
            begin = self._text.find(BEGIN)
            end = self._text.find(END, begin) if begin >= 0 else -1
            if end < 0:
                break
            call = _parse(self._text[begin + len(BEGIN) : end])
            call_text = self._take(end + len(END))
            if call is None:
                content += call_text
            else:
                calls.append(call)
                self._after_call = self._called = True
        if last:
            cut_off = self._called and self._text.lstrip().startswith(BEGIN)
            content += "" if cut_off else self._text
            self._text = ""
        return Parsed(content, calls)

    def _take(self, length: int) -> str:
        """Remove the beginning of the text and return it."""
        taken, self._text = self._text[:length], self._text[length:]
        self._after_call = self._after_call and not taken
        return taken


def _call_begin(text: str) -> int:
    """Return where a call begins in ``text`` or may begin with its last characters."""
    begin = text.find(BEGIN)
    if begin >= 0:
        return begin
    return len(text) - max(n for n in range(len(BEGIN)) if text.endswith(BEGIN[:n]))


def _parse(body: str) -> Json | None:
    """Return the call of a JSON object with ``name`` and ``arguments``, or None."""
    try:
        given = json.loads(body)
        return tool_call(given.get("name"), given.get("arguments", {}))
    except (ValueError, AttributeError, RecursionError):
        return None


def tool_call(name: Any, arguments: Any) -> Json:
    """Return a call that the model has written, as OpenAI's clients get it.

    Args:
        name: of the function.
        arguments: an object, or JSON text.

    Raises:
        ValueError: the name is no text, the arguments are something else or cannot be written as
            JSON.
        RecursionError: the arguments are nested too deeply.
    """
    if not isinstance(name, str) or not isinstance(arguments, dict | str):
        raise ValueError("a call has a name, and an object with arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{arguments}".encode()  # a lone surrogate raises, as it cannot be sent
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

"""Tool calls: their format in the chat template, their grammar, and parsing them."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from token_recycling.server.json_schema import ANY_OBJECT, limited

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call that the model has written.

    Attributes:
        name: of the function.
        arguments: JSON text.
        id: by which the answer of the tool refers to it.
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True)
class Parsed:
    """What a parser has made of new text.

    Attributes:
        content: of the answer.
        calls: those that are complete with it.
        reasoning: text that the model has written for itself.
    """

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""


class AnswerParser(Protocol):
    """Divides the text of an answer, as it comes.

    Attributes:
        special_tokens: True if the text must contain special tokens.
    """

    special_tokens: bool

    def feed(self, piece: str, *, last: bool = False) -> Parsed: ...  # noqa: D102


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


def call_grammar(functions: list[dict[str, Any]], *, forced: bool, several: bool) -> str:
    """Return the grammar of an answer that may call ``functions``.

    Args:
        functions: OpenAI's ``function`` objects, with ``name`` and perhaps ``parameters``.
        forced: the answer must be a call; else it may be text, with calls.
        several: more than one call is allowed.
    """
    names = [f"call_{index}" for index in range(len(functions))]
    calls = " | ".join(names)
    if forced:
        more = f"(NEXT ({calls}))*" if several else ""
        lines = [f"start: FIRST ({calls}) {more}", f"FIRST: {json.dumps(BEGIN)}"]
        lines += [f"NEXT: {json.dumps(chr(10) + BEGIN)}"] if several else []
    else:
        start = f"(to_call ({calls}))* TEXT" if several else f"to_call ({calls}) | TEXT"
        lines = [f"start: {start}", f"to_call[lazy]: TEXT {json.dumps(BEGIN)}", r"TEXT: /(.|\n)*/"]
    for name, function in zip(names, functions):
        begin = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
        schema = limited(function.get("parameters") or ANY_OBJECT)
        end = f"}}\n{END}"
        lines.append(f"{name}: {json.dumps(begin)} %json {json.dumps(schema)} {json.dumps(end)}")
    return "\n".join(["%llguidance {}", *lines])


class CallParser:
    """Divides the text of an answer into content and calls, as it comes.

    White space in front of a call and after it belongs to the format.
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


def _parse(body: str) -> ToolCall | None:
    """Return the call of a JSON object with ``name`` and ``arguments``, or None."""
    try:
        given = json.loads(body)
        return tool_call(given.get("name"), given.get("arguments", {}))
    except (ValueError, AttributeError, RecursionError):
        return None


def tool_call(name: Any, arguments: Any) -> ToolCall:
    """Return a call that the model has written.

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
    text = arguments
    if not isinstance(text, str):
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    f"{name}{text}".encode()  # a lone surrogate raises, as it cannot be sent
    return ToolCall(name, text)

"""Tool calls: their format in the chat template, their grammar, and parsing them."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from llguidance import StructTag

from token_recycling.server.grammar import ANY_OBJECT, with_white_space

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
    starts = [f'{BEGIN}\n{{"name": {json.dumps(one["name"])}, "arguments": ' for one in functions]
    schemas = [with_white_space(one.get("parameters") or ANY_OBJECT) for one in functions]
    if not forced and several:
        tags = [
            StructTag(trigger=BEGIN, begin=start, grammar=schema, end=f"}}\n{END}")
            for start, schema in zip(starts, schemas)
        ]
        grammar: str = StructTag.to_grammar(tags, assume_special=False)
        return grammar
    rules = " | ".join(f"call_{index}" for index in range(len(functions)))
    more = f'("\\n" ({rules}))*' if several else ""
    start = f"start: ({rules}) {more}" if forced else f"start: TEXT | TEXT ({rules})"
    lines = ["%llguidance {}", start, f"TEXT: /(?s:.*)/ & ~/(?s:.*{BEGIN}.*)/"]
    for index, (begin, schema) in enumerate(zip(starts, schemas)):
        ending = json.dumps(f"}}\n{END}")
        lines.append(f"call_{index}: {json.dumps(begin)} args_{index} {ending}")
        lines.append(f"args_{index}: %json {json.dumps(schema)}")
    return "\n".join(lines if not forced else [*lines[:2], *lines[3:]])


class CallParser:
    """Divides the text of an answer into content and calls, as it comes."""

    def __init__(self) -> None:
        """Start before the first character."""
        self._text = ""
        self._calls = 0

    def feed(self, piece: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add text.

        Args:
            piece: the text.
            last: no more text follows; what is incomplete counts as content.

        Returns:
            The content and the calls that are complete with it.
        """
        self._text += piece
        content, calls = "", []
        while True:
            begin = self._text.find(BEGIN)
            if begin < 0:
                break
            end = self._text.find(END, begin)
            if end < 0:
                break
            content += self._text[:begin]
            body = self._text[begin + len(BEGIN) : end]
            self._text = self._text[end + len(END) :]
            call = _parse(body)
            if call is None:
                content += BEGIN + body + END
            else:
                calls.append(call)
                content = content.rstrip()
        self._calls += len(calls)
        if last:
            content, self._text = content + self._text, ""
        elif begin < 0:
            kept = max(n for n in range(len(BEGIN)) if self._text.endswith(BEGIN[:n]))
            # White space in front of a call belongs to the format.
            body = self._text[: len(self._text) - kept].rstrip()
            content, self._text = content + body, self._text[len(body) :]
        if self._calls:
            content = content.strip()
        return content, calls


def _parse(body: str) -> ToolCall | None:
    """Return the call of a JSON object with ``name`` and ``arguments``, or None."""
    try:
        given = json.loads(body)
    except ValueError:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return None
    arguments = given.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(given["name"], text)

"""Answers of models whose tokenizer has a ``response_template``, parsed by Transformers.

Such a template says how the model writes its reasoning and its calls of tools.
"""

from __future__ import annotations

import json
from typing import Any

from token_recycling.server.tools import Parsed, ToolCall

# Names of the field for reasoning: that of Transformers, and others that templates use.
REASONING = ("reasoning_content", "reasoning", "thinking")


def response_fields(tokenizer: Any) -> frozenset[str]:
    """Return the fields of the tokenizer's ``response_template``; none if it has no such thing."""
    template = getattr(tokenizer, "response_template", None)
    if not isinstance(template, dict) or not hasattr(tokenizer, "get_response_parser"):
        return frozenset()
    return frozenset(template.get("fields", ()))


class TemplateParser:
    """Divides an answer as ``CallParser`` does, by the tokenizer's ``response_template``.

    Attributes:
        special_tokens: True: the text must contain special tokens, as templates refer to them.
    """

    special_tokens = True

    def __init__(self, tokenizer: Any, prompt: str, tools: list[dict[str, Any]]) -> None:
        """Start after ``prompt``, which may have begun the answer.

        Args:
            tokenizer: has a ``response_template`` (Transformers 5).
            prompt: the text in front of the answer, with its special tokens.
            tools: OpenAI's ``tools``; arguments are converted to the types of their schemas.

        Raises:
            ValueError: the template is not valid.
        """
        self._parser = tokenizer.get_response_parser(prefix=prompt, tools=tools)
        self._held = ""  # text that nothing has been made of yet
        self._failed = self._called = self._begun = False

    def feed(self, piece: str, *, last: bool = False) -> Parsed:
        """Add text; see ``CallParser.feed``.

        What does not follow the template is content, and so is all that comes after it.
        """
        if self._failed:
            return Parsed(piece)
        self._held += piece
        try:
            events = self._parser.feed(piece)
            if last:
                events += self._parser.finalize()[1]
            return self._parsed(events)
        except (ValueError, KeyError, TypeError):  # for example, arguments that are no JSON
            self._failed = True
            cut_off = last and self._called
            return Parsed("" if cut_off else self._held)

    def _parsed(self, events: list[dict[str, Any]]) -> Parsed:
        content = reasoning = ""
        calls: list[ToolCall] = []
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_chunk" and not event["dirty"]:
                text = event["text"]
                self._held = self._held.partition(text)[2]
                if field == "content":
                    # Templates put white space between reasoning and content.
                    content += text if self._begun else text.lstrip()
                    self._begun = self._begun or bool(content)
                elif field in REASONING:
                    reasoning += text
            elif kind == "region_close" and field == "tool_calls":
                value = event["value"]
                calls += [_call(one) for one in (value if isinstance(value, list) else [value])]
                self._called, self._held = True, ""
        return Parsed(content, calls, reasoning)


def _call(value: Any) -> ToolCall:
    """Return a call that a template has made.

    Raises:
        ValueError: it has no name.
    """
    function = value["function"]
    name, arguments = function["name"], function.get("arguments", {})
    if not isinstance(name, str):
        raise ValueError("a call without a name")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, text)

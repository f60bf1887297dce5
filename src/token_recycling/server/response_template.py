"""Answers of models whose tokenizer has a ``response_template``, parsed by Transformers.

Such a template says how the model writes its reasoning and its calls of tools: an answer consists
of regions, each with a pattern that opens it and one that closes it. A call is parsed when its
region is complete, on its own, so that one that is malformed concerns nothing else.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from skinny_kernels.errors import one_line
from token_recycling.server.tools import Json, Parsed, tool_call

logger = logging.getLogger(__name__)
CALLS = "tool_calls"
OPENED = "opened_with"  # the capture of what has opened a call
OPENS, CLOSES = ("open", "open_pattern"), ("close", "close_pattern")
# Text as the model has written it.
VERBATIM: Json = {"content": "text", "content_args": {"strip": False}}


class ResponseTemplate:
    """The ``response_template`` of a tokenizer.

    Attributes:
        takes_tools: True if it says how calls are written.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Prepare the template of ``tokenizer`` (Transformers 5).

        Raises:
            ValueError, TypeError, KeyError, re.error: it is not valid.
        """
        self._tokenizer, given = tokenizer, tokenizer.response_template
        fields = dict(given["fields"])
        call = fields.pop(CALLS, None)
        self.takes_tools = call is not None and bool(_pattern(call, "open"))
        texts = {}
        for name, field in fields.items():
            delimiters = {side: field[side] for side in (*OPENS, *CLOSES) if side in field}
            # Named groups of a pattern need a transform.
            texts[name] = {**delimiters, **VERBATIM, "transform": "{content}"}
        self._texts = {**given, "fields": texts}
        self._with_calls = self._one_call = self._texts
        self.call_end: re.Pattern[str] | None = None
        if self.takes_tools:
            begin = {"open_pattern": f"(?P<{OPENED}>{_pattern(call, 'open')})"}
            end = {name: call[name] for name in CLOSES if name in call}
            parts = {OPENED: f"{{{OPENED}}}", "content": "{content}"}
            call_field = {**begin, **end, **VERBATIM, "transform": parts}
            self._with_calls = {**given, "fields": {**texts, CALLS: call_field}}
            single_call = {name: value for name, value in call.items() if name not in end}
            self._one_call = {**given, "defaults": {}, "fields": {CALLS: single_call}}
            if end:
                self.call_end = re.compile(_pattern(call, "close"), re.DOTALL)
        special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) if special else r"(?!)")
        for template in (self._texts, self._with_calls, self._one_call):
            tokenizer.get_response_parser(template, prefix="")  # raises if it is not valid

    def regions(self, prompt: str, *, calls: bool) -> Any:
        """Return Transformers' parser of an answer to ``prompt``, which only finds the regions."""
        template = self._with_calls if calls else self._texts
        return self._tokenizer.get_response_parser(template, prefix=prompt)

    def calls(self, text: str, tools: list[dict[str, Any]]) -> list[Json]:
        """Return the calls of a region without its end; most models write one.

        Raises:
            ValueError: it is malformed.
        """
        try:
            parsed = self._tokenizer.parse_response(text, self._one_call, prefix="", tools=tools)
            values = parsed[CALLS]
            functions = [
                value["function"] for value in (values if isinstance(values, list) else [values])
            ]
            return [
                tool_call(function["name"], function.get("arguments", {})) for function in functions
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no call of a tool: {one_line(error, 200)}") from error

    def without_special(self, text: str) -> str:
        """Return ``text`` without special tokens."""
        return self._special.sub("", text)


def response_template(tokenizer: Any) -> ResponseTemplate | None:
    """Return the tokenizer's ``response_template``, or None if it has none that can be used."""
    if getattr(tokenizer, "response_template", None) is None:
        return None
    try:
        return ResponseTemplate(tokenizer)
    except Exception as error:  # templates are files of strangers
        logger.warning("the tokenizer's response_template is not used: %s", one_line(error, 200))
        return None


def _pattern(field: Json, side: str) -> str:
    """Return the pattern that opens or closes a field; "" if there is none."""
    if (literal := field.get(side)) is not None:
        literals = [literal] if isinstance(literal, str) else literal
        return "|".join(map(re.escape, sorted(literals, key=len, reverse=True)))
    pattern: str = field.get(f"{side}_pattern", "")
    return pattern


class TemplateParser:
    """Divides an answer as ``CallParser`` does, by a ``ResponseTemplate``.

    Attributes:
        special_tokens: True: the text must contain special tokens, as templates refer to them.
    """

    special_tokens = True

    def __init__(
        self, template: ResponseTemplate, prompt: str, tools: list[dict[str, Any]]
    ) -> None:
        """Start after ``prompt``, which may have begun the answer.

        Args:
            template: says what to look for.
            prompt: the text in front of the answer, with its special tokens.
            tools: OpenAI's ``tools``; arguments are converted to the types of their schemas.
                Without any, calls are content.
        """
        self._template, self._tools = template, tools
        self._regions = template.regions(prompt, calls=bool(tools))
        self._raw, self._read = "", 0  # the answer so far; the calls in front of _read are done
        self._begun: set[str] = set()  # fields that have text
        self._called = False

    def feed(self, piece: str, *, last: bool = False) -> Parsed:
        """Add text; see ``CallParser.feed``. A call that is malformed is content."""
        self._raw += piece
        parts = [self._take(event, complete=True) for event in self._regions.feed(piece)]
        if last:
            end = self._template.call_end
            complete = end is None or bool(
                re.search(rf"(?:{end.pattern})\s*\Z", self._raw, re.DOTALL)
            )
            parts += [self._take(event, complete=complete) for event in self._regions.finalize()[1]]
            if not (self._begun or self._called):  # all text is outside of the regions
                parts.append(Parsed(self._text("content", self._raw)))
        return Parsed(
            "".join(part.content for part in parts),
            [call for part in parts for call in part.calls],
            "".join(part.reasoning for part in parts),
        )

    def _take(self, event: dict[str, Any], *, complete: bool) -> Parsed:
        """Return what an event adds; ``complete``: a call that ends with it is not cut off."""
        kind, field = event["type"], event["field"]
        if kind == "region_chunk" and field != CALLS:
            text = self._text("content" if field == "content" else "reasoning", event["text"])
            return Parsed(text) if field == "content" else Parsed("", reasoning=text)
        if kind == "region_close" and field == CALLS:
            return self._call(event["value"][OPENED] + event["value"]["content"], complete)
        return Parsed("")

    def _text(self, field: str, text: str) -> str:
        """Return text without special tokens, and without white space at the beginning."""
        text = self._template.without_special(text)
        if field not in self._begun:
            text = text.lstrip()
        if text:
            self._begun.add(field)
        return text

    def _call(self, text: str, complete: bool) -> Parsed:
        """Return the call in a region without its end, or its text if that is no call."""
        begin = self._raw.find(text, self._read)
        end = begin + len(text)
        if begin >= 0:  # else the prompt has begun it
            close = self._template.call_end and self._template.call_end.match(self._raw, end)
            self._read = close.end() if close else end
            written = self._raw[begin : self._read]
        else:
            written = text
        if complete:
            try:
                calls = self._template.calls(text, self._tools)
            except ValueError:
                return Parsed(self._text("content", written))
            self._called = True
            return Parsed("", calls)
        return Parsed("" if self._called else self._text("content", written))

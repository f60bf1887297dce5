"""Models whose tokenizer says how their answers are parsed: reasoning and calls of tools."""

from __future__ import annotations

import copy
import json
import re

import httpx2 as httpx
import pytest

from serving import running
from token_recycling.server.response_template import TemplateParser, response_fields
from token_recycling.server.tools import takes_tools

pytest.importorskip("transformers.utils.chat_parsing")

CHAT = "/v1/chat/completions"
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<call:(?P<name>\w+)>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": "<end>", "content": "text"},
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {"hours": {"type": "integer"}}},
    },
}
CALL = '<call:clock>{"hours": "24"}</call>'


class TestTemplateParser:
    @pytest.fixture(scope="class")
    def tokenizer(self, bundled):
        made = copy.deepcopy(bundled.tokenizer)
        made.response_template = TEMPLATE
        return made

    def parsed(self, tokenizer, text, *, prompt="<assistant>", size=1):
        """Content, reasoning and calls of a text that comes in pieces of ``size``."""
        parser = TemplateParser(tokenizer, prompt, [CLOCK])
        assert parser.special_tokens
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        new = [*(parser.feed(piece) for piece in pieces), parser.feed("", last=True)]
        calls = [(call.name, call.arguments) for one in new for call in one.calls]
        return "".join(one.content for one in new), "".join(one.reasoning for one in new), calls

    @pytest.mark.parametrize("size", [1, 2, 7, 1000])
    def test_content_reasoning_and_calls(self, tokenizer, size):
        text = f"<think>Which zone?</think>\n\nLet me look.{CALL}{CALL}<end>"
        # The argument gets the type of its schema.
        calls = [("clock", '{"hours": 24}')] * 2
        found = self.parsed(tokenizer, text, size=size)
        assert found == ("Let me look.", "Which zone?", calls)

    def test_reasoning_that_the_prompt_begins(self, tokenizer):
        prompt = "<assistant>An earlier turn.<end><assistant><think>"
        found = self.parsed(tokenizer, "So?</think>Yes.", prompt=prompt)
        assert found == ("Yes.", "So?", [])

    @pytest.mark.parametrize("size", [1, 1000])
    def test_what_is_no_call_is_content(self, tokenizer, size):
        text = "Look: <call:clock>no JSON</call> and on"
        content, _, calls = self.parsed(tokenizer, text, size=size)
        assert (content, calls) == (text, [])

    def test_a_call_that_is_cut_off(self, tokenizer):
        assert self.parsed(tokenizer, CALL[:-9]) == (CALL[:-9], "", [])
        cut = self.parsed(tokenizer, CALL + CALL[:-9])
        assert cut == ("", "", [("clock", '{"hours": 24}')])

    def test_fields(self, tokenizer, bundled):
        assert response_fields(tokenizer) == {"reasoning_content", "tool_calls", "content"}
        assert response_fields(bundled.tokenizer) == set()


# What the bundled model writes anyway is taken as reasoning and calls.
STORY = {
    **TEMPLATE,
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "A ", "close": ",", "content": "text"},
        "tool_calls": {
            "open_pattern": r" who (?P<name>\w+)",
            "close": ".",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}
ASKED = {
    "messages": [{"role": "user", "content": "Tell me a story"}],
    "temperature": 0,
    "max_tokens": 60,
}


@pytest.fixture(scope="module")
def served(recycler):
    changed = copy.copy(recycler)
    changed.tokenizer = copy.deepcopy(recycler.tokenizer)
    changed.tokenizer.response_template = STORY
    # Without the format that is enforced.
    changed.tokenizer.chat_template = changed.tokenizer.chat_template.replace("tool_call", "call")
    assert not takes_tools(changed.tokenizer)
    with running(changed) as made:
        yield made


def test_answers_are_parsed(served, recycler):
    whole = recycler.generate(ASKED["messages"], max_new_tokens=60).text
    calls = r"(.*?) who (\w+)(.*?)\." * 2
    first = re.fullmatch(f"A (.*?),{calls}(.*)", whole, re.S)
    reasoning, begin, *calls, end = first.groups()
    (choice,) = served.post(CHAT, **ASKED).json()["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == reasoning
    assert message["content"] == begin.lstrip() + calls.pop(2) + end
    found = [call["function"] for call in message["tool_calls"]]
    assert [text for one in found for text in (one["name"], one["arguments"])] == [
        *(calls[0], calls[1].strip(), calls[2], calls[3].strip())
    ]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("tools", [[], [CLOCK]])
def test_streams_have_the_same_parts(served, tools):
    body = {**ASKED, "tools": tools} if tools else ASKED
    message = served.post(CHAT, **body).json()["choices"][0]["message"]
    parts = {"content": "", "reasoning_content": ""}
    calls = []
    with httpx.stream("POST", served.url + CHAT, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                for name in parts:
                    parts[name] += delta.get(name) or ""
                calls += [call["function"] for call in delta.get("tool_calls", [])]
    assert parts["content"] == (message["content"] or "")
    assert parts["reasoning_content"] == message.get("reasoning_content", "")
    assert calls == [call["function"] for call in message.get("tool_calls", [])]


def test_a_template_without_calls_leaves_them_to_the_chat_template(recycler):
    changed = copy.copy(recycler)
    changed.tokenizer = copy.deepcopy(recycler.tokenizer)
    fields = {name: STORY["fields"][name] for name in ("reasoning_content", "content")}
    changed.tokenizer.response_template = {**STORY, "fields": fields}
    with running(changed) as served:
        (choice,) = served.post(CHAT, **ASKED).json()["choices"]
        assert choice["message"]["reasoning_content"]
        forced = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
        (choice,) = served.post(CHAT, **{**ASKED, "max_tokens": 300}, **forced).json()["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"


def test_json_is_not_parsed(served):
    form = {"type": "json_object"}
    (choice,) = served.post(CHAT, **ASKED, response_format=form).json()["choices"]
    assert "reasoning_content" not in choice["message"]
    assert choice["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    "more, param, says",
    [
        ({"tool_choice": "required"}, "tool_choice", "tool_choice must be auto or none"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
            "tool_choice",
            "tool_choice must be auto or none",
        ),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "must be true"),
        (
            {"tools": [{"type": "function", "function": {"name": "clock", "strict": True}}]},
            "tools",
            "strict must be false",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused(served, more, param, says):
    answer = served.post(CHAT, **{**ASKED, "tools": [CLOCK], **more})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], says in error["message"]) == (param, True), error

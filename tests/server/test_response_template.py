"""Models whose tokenizer says how their answers are parsed: reasoning and calls of tools."""

from __future__ import annotations

import copy
import json
import re

import httpx2 as httpx
import pytest

from serving import running
from token_recycling.server.response_template import (
    ResponseTemplate,
    TemplateParser,
    response_template,
)
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


XML = {
    **TEMPLATE["fields"]["tool_calls"],
    "open_pattern": r"\s*<call:(?P<name>\w+)>",
    "close_pattern": r"</call>\s*",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
}
del XML["close"]


def with_field(name, field):
    """The template with another field, or without it."""
    fields = {**TEMPLATE["fields"], name: field}
    return {**TEMPLATE, "fields": {name: one for name, one in fields.items() if one is not None}}


@pytest.fixture(scope="module")
def tokenizer(bundled):
    return copy.deepcopy(bundled.tokenizer)


class TestTemplateParser:
    def parsed(self, tokenizer, text, *, template=TEMPLATE, prompt="<assistant>", tools=(CLOCK,)):
        """Content, reasoning and calls of a text, which are the same however it is cut."""
        tokenizer.response_template = template
        made = ResponseTemplate(tokenizer)
        results = []
        for size in (1000, 1, 2, 3, 5, 7, 11):
            parser = TemplateParser(made, prompt, list(tools))
            assert parser.special_tokens
            # A special token is a token, and comes whole.
            pieces = re.findall(rf"<\|end\|>|(?:(?!<\|end\|>).){{1,{size}}}", text, re.S)
            new = [*(parser.feed(piece) for piece in pieces), parser.feed("", last=True)]
            calls = [tuple(call["function"].values()) for one in new for call in one.calls]
            content = "".join(one.content for one in new)
            results.append((content, "".join(one.reasoning for one in new), calls))
        assert all(result == results[0] for result in results), results
        return results[0]

    def test_content_reasoning_and_calls(self, tokenizer):
        text = f"<think>Which zone?</think>\n\nLet me look.{CALL}{CALL}<end>"
        # The argument gets the type of its schema.
        calls = [("clock", '{"hours": 24}')] * 2
        assert self.parsed(tokenizer, text) == ("Let me look.", "Which zone?", calls)

    def test_reasoning_that_the_prompt_begins(self, tokenizer):
        prompt = "<assistant>An earlier turn.<end><assistant><think>"
        found = self.parsed(tokenizer, "So?</think>Yes.", prompt=prompt)
        assert found == ("Yes.", "So?", [])

    @pytest.mark.parametrize(
        "body", ["no JSON", "[]", '{"x": NaN}', '{"x": "\\ud83d"}', "[" * 5000, ""]
    )
    def test_what_is_no_call_is_content(self, tokenizer, body):
        """Reasoning, content and calls around it stay what they are."""
        wrong = f"<call:clock>{body}</call>"
        text = f"<think>in</think>in{CALL}{wrong} on{CALL}"
        calls = [("clock", '{"hours": 24}')] * 2
        assert self.parsed(tokenizer, text) == (f"in{wrong} on", "in", calls)

    def test_a_call_that_is_cut_off(self, tokenizer):
        assert self.parsed(tokenizer, CALL[:-9]) == (CALL[:-9], "", [])
        one = [("clock", '{"hours": 24}')]
        assert self.parsed(tokenizer, CALL + CALL[:-9]) == ("", "", one)

    def test_arguments_that_are_cut_off_are_no_call(self, tokenizer):
        """Even where the part that is there can be parsed."""
        template = with_field("tool_calls", XML)
        whole = "<call:clock><hours>24</hours><zone>CET</zone></call>"
        call = ("clock", '{"hours": 24, "zone": "CET"}')
        assert self.parsed(tokenizer, whole, template=template) == ("", "", [call])
        for cut in (whole[:-1], whole[:40], whole[:14]):
            assert self.parsed(tokenizer, cut, template=template) == (cut, "", [])
            assert self.parsed(tokenizer, f"{whole} {cut}", template=template)[2] == [call]

    def test_without_tools_there_are_no_calls(self, tokenizer):
        assert self.parsed(tokenizer, f"Look: {CALL}<end>", tools=[]) == (f"Look: {CALL}", "", [])

    def test_special_tokens_are_no_content(self, tokenizer):
        template = with_field("content", {"content": "text"})  # nothing ends it
        found = self.parsed(tokenizer, "Hello.<|end|>", template=template)
        assert found == ("Hello.", "", [])

    def test_text_outside_of_all_fields_is_content(self, tokenizer):
        template = with_field("content", {"open": "<say>", "close": "<end>", "content": "text"})
        assert self.parsed(tokenizer, "<say>Hello.<end>", template=template)[0] == "Hello."
        assert self.parsed(tokenizer, "Hello.<|end|>", template=template)[0] == "Hello."

    @pytest.mark.parametrize(
        "template",
        [
            5,
            {},
            {**TEMPLATE, "fields": 5},
            {**TEMPLATE, "fields": []},
            {**TEMPLATE, "fields": {"content": 5}},
            {name: value for name, value in TEMPLATE.items() if name != "start_anchor"},
            with_field("tool_calls", {**XML, "open_pattern": "("}),
            with_field("tool_calls", {**XML, "close_pattern": "("}),
            with_field("tool_calls", {**XML, "content": "yaml"}),
        ],
    )
    def test_templates_that_are_not_valid_are_not_used(self, tokenizer, template, caplog):
        tokenizer.response_template = template
        assert response_template(tokenizer) is None
        assert "the tokenizer's response_template is not used: " in caplog.text

    def test_most_tokenizers_have_none(self, bundled, caplog):
        assert response_template(bundled.tokenizer) is None
        assert not caplog.text


# What the bundled model writes anyway is taken as reasoning and calls.
STORY = {
    **TEMPLATE,
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": ["A ", "def "], "close": [",", "("], "content": "text"},
        "tool_calls": {
            "open_pattern": r" a (?P<name>\w+)",
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
    """The parts are those of the text that the same prompt has without a parser."""
    messages = ASKED["messages"]
    prompt = recycler.tokenizer.apply_chat_template(
        messages, tools=[CLOCK], tokenize=False, add_generation_prompt=True
    ).replace("tool_call", "call")
    ids = recycler.tokenizer(prompt, add_special_tokens=False).input_ids
    whole = recycler.generate(ids, max_new_tokens=60).text
    reasoning, rest = re.fullmatch(r"def (.*?)\((.*)", whole, re.S).groups()
    content = re.sub(r" a (\w+)(.*?)\.", "", rest, flags=re.S)
    (choice,) = served.post(CHAT, **ASKED, tools=[CLOCK]).json()["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == reasoning
    assert (message["content"] or "") == content.lstrip()
    found = [tuple(call["function"].values()) for call in message.get("tool_calls", [])]
    calls = re.findall(r" a (\w+)(.*?)\.", rest, re.S)
    assert found == [(name, text.strip()) for name, text in calls]
    assert calls


@pytest.mark.parametrize("more", [{}, {"tools": [CLOCK]}, {"tools": [CLOCK], "n": 2}])
def test_streams_have_the_same_parts(served, more):
    body = {**ASKED, "temperature": 0.8, "seed": 5, **more}
    messages = [one["message"] for one in served.post(CHAT, **body).json()["choices"]]
    parts = [{"content": "", "reasoning_content": "", "calls": []} for _ in messages]
    with httpx.stream("POST", served.url + CHAT, json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                part, delta = parts[choice["index"]], choice["delta"]
                for name in ("content", "reasoning_content"):
                    part[name] += delta.get(name) or ""
                part["calls"] += [call["function"] for call in delta.get("tool_calls", [])]
    for message, part in zip(messages, parts, strict=True):
        assert part["content"] == (message["content"] or "")
        assert part["reasoning_content"] == message.get("reasoning_content", "")
        assert part["calls"] == [call["function"] for call in message.get("tool_calls", [])]


def test_without_tools_there_are_no_calls(served, recycler):
    for body in (ASKED, {**ASKED, "tools": [CLOCK], "tool_choice": "none"}):
        (choice,) = served.post(CHAT, **body).json()["choices"]
        message = choice["message"]
        assert "tool_calls" not in message
        whole = recycler.generate(ASKED["messages"], max_new_tokens=60).text
        assert f"A {message['reasoning_content']}, {message['content']}" == whole


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

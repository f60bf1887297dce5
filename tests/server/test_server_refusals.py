"""What requests may not contain, in OpenAI's shape of errors; and the table in docs/server.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_type_hints

import httpx2 as httpx
import openai
import pytest
from openai.types import completion_create_params as of_completions
from openai.types.chat import completion_create_params as of_chat

from serving import NAME
from token_recycling.server.schemas import (
    REFUSED_CHAT,
    REFUSED_COMPLETION,
    WITHOUT_EFFECT_CHAT,
    WITHOUT_EFFECT_COMPLETION,
    ChatRequest,
    CompletionRequest,
)

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
CONTINUED = {"prompt": "Hello", "max_tokens": 2}
FUNCTION = {"name": "clock", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
# Values that ask for something.
ASKING = {
    "audio": {"voice": "alloy", "format": "wav"},
    "modalities": ["text", "audio"],
    "function_call": "auto",
    "functions": [FUNCTION],
    "moderation": {"model": "omni-moderation-latest"},
    "prediction": {"type": "content", "content": "Hello"},
    "verbosity": "low",
    "web_search_options": {},
    "echo": True,
    "suffix": "the end",
    "best_of": 3,
}


def documented():
    """Endpoint and field -> what docs/server.md says of it."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    kinds = {"both": (CHAT, COMPLETIONS), "chat": (CHAT,), "completions": (COMPLETIONS,)}
    return {(path, name): about for name, kind, about in rows for path in kinds[kind]}


CHAT_FIELDS = (CHAT, of_chat, ChatRequest, REFUSED_CHAT, WITHOUT_EFFECT_CHAT)
COMPLETION_FIELDS = (
    *(COMPLETIONS, of_completions, CompletionRequest),
    *(REFUSED_COMPLETION, WITHOUT_EFFECT_COMPLETION),
)


def fields():
    for path, module, *others in (CHAT_FIELDS, COMPLETION_FIELDS):
        for name in [*get_type_hints(module.CompletionCreateParamsBase), "stream"]:
            yield path, name, *others


@pytest.mark.parametrize("path, name, model, refused, ignored", fields())
def test_every_field_of_openai_does_what_the_table_says(
    server, path, name, model, refused, ignored
):
    about = documented()[path, name]
    body = ASKED if path == CHAT else CONTINUED
    if name in refused or name == "best_of":
        answer = server.post(path, **body, **{name: ASKING[name]})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == name
        message = error["message"]
        assert f"refused: “{message}”" in about
    elif name in ignored:
        assert about.startswith("no effect")
        assert server.post(path, **body, **{name: "anything"}).status_code == 200
    else:
        assert about.startswith("served")
        assert name in model.model_fields


def test_the_table_has_no_other_fields():
    ours = {"top_k", "min_p", "repetition_penalty", "chat_template_kwargs"}
    known = {(path, name) for path, name, *_ in fields()}
    assert {name for path, name in documented() if (path, name) not in known} == ours


@pytest.mark.parametrize(
    "name, value",
    [
        ("store", False),
        ("store", True),
        ("reasoning_effort", "low"),
        ("modalities", ["text"]),
        ("verbosity", "medium"),
        ("functions", []),
        ("function_call", "none"),
    ],
)
def test_values_that_ask_for_nothing_are_accepted(server, name, value):
    assert server.post(CHAT, **ASKED, **{name: value}).status_code == 200
    assert server.post(CHAT, **ASKED, **{name: None}).status_code == 200


SAID = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
CHAT_CASES = [
    ({"foo": 1}, "foo", "unrecognized request argument: foo"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 17}, "n", "less than or equal to 16"),
    ({"n": True}, "n", "valid integer"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"temperature": "0.5"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
    (
        {"max_completion_tokens": 3},
        "max_tokens",
        "max_tokens is the old name of max_completion_tokens",
    ),
    ({"seed": 2**64}, "seed", "less than"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    (
        {"stream": False, "stream_options": {"include_usage": True}},
        "stream_options",
        "stream_options needs stream: true",
    ),
    ({"reasoning_effort": "much"}, "reasoning_effort", "should be 'none'"),
    ({"stop": ""}, "stop", "strings that are not empty"),
    ({"stop": ["a"] * 17}, "stop", "stop has 17 strings; at most 16 are possible"),
    ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias", "at most 4096"),
    ({"tools": [TOOL] * 129}, "tools", "tools has 129 tools; at most 128 are possible"),
    ({"messages": SAID * 2048}, "messages", "the prompt has 2048 messages; the model's context"),
    ({"messages": [*SAID, {}, {}]}, "messages.1.role", "messages.1.role is missing"),
    ({"tools": [{**TOOL, "colour": 1}]}, "tools.0.colour", "unrecognized request argument"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot set messages"),
    ({"a" * 1000: 1}, "a" * 500 + "…", "unrecognized request argument: aaa"),
    ({"logit_bias": {"٣": 1}}, "logit_bias", "is not a token id"),
    ({"logit_bias": {"01": 1}}, "logit_bias", '"01" is not a token id'),
    ({"logit_bias": {"hello": 1}}, "logit_bias", '"hello" is not a token id'),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "token ids must be from 0 to 4095"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": None}, "messages", "messages: input should be a valid list"),
    ({"messages": "Hello"}, "messages", "valid list"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "should be 'system'"),
    ({"messages": [{"role": "user"}]}, "messages.0", "content is missing"),
    (
        {"messages": [{"role": "user", "content": "x", "colour": 1}]},
        "messages.0",
        'unknown field "colour"',
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0",
        "only parts with type: text are supported",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "belong together"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "should be 'text'"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "flower"}},
            }
        },
        "response_format",
        "invalid schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": "#"}},
            }
        },
        "response_format",
        "invalid schema: no text satisfies it",
    ),
    (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"type": "flower"}},
                }
            ]
        },
        "tools",
        'the function "f": invalid schema',
    ),
    ({"tools": [TOOL, TOOL]}, "tools", "two functions have the same name"),
    ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "tool_choice names a function that is not in tools",
    ),
    ({"messages": ["Hello"]}, "messages.0", "should be an object"),
    ({"tools": [TOOL], "response_format": SCHEMA}, "response_format", "cannot be combined"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools.0.function.name",
        "match pattern",
    ),
    ({"chat_template_kwargs": {"conversation": []}}, "chat_template_kwargs", "conversation"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
    ({"model": "gpt-5"}, "model", 'the model "gpt-5" does not exist; this server has "demo"'),
]


@pytest.mark.parametrize("more, param, says", CHAT_CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_requests_that_are_refused(server, more, param, says, stream):
    answer = server.post(CHAT, **{**ASKED, "stream": stream, **more})
    check(answer, 404 if "model" in more else 400, param, says)


def check(answer, status, param, says):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"], says in error["message"]) == (param, True), error
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "more, param, says",
    [
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"metadata": {}}, "metadata", "unrecognized request argument: metadata"),
        ({"prompt": ["x", 5]}, "prompt.1", "valid string"),
        ({"prompt": [1, "x"]}, "prompt.1", "valid integer"),
        ({"prompt": [[1], [1, True]]}, "prompt.1.1", "valid integer"),
        ({"prompt": [[1], "x"]}, "prompt.1", "a list of token ids"),
        ({"prompt": [True]}, "prompt.0", "a string, token ids, or a list of one or the other"),
        ({"prompt": {}}, "prompt", "a string, token ids, or a list of one or the other"),
        ({"prompt": ["x"] * 17}, "prompt", "prompt has 17 prompts; at most 16 are possible"),
        ({"prompt": [1] * 2048}, "prompt", "the prompt has 2048 tokens; the model's context"),
        ({"prompt": [[], [5]]}, "prompt", "the prompt is empty"),
        ({"prompt": [5000]}, "prompt", "token ids must be from 0 to 4095"),
        ({"prompt": [-1]}, "prompt", "token ids must be from 0 to 4095"),
        ({"prompt": ["x"] * 5, "n": 4}, "n", "prompts times n may be at most 16"),
        ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
        (
            {"max_tokens": 2048},
            "max_tokens",
            "at most 2048 more are asked for",
        ),
        ({"prompt": "ab " * 3000}, "prompt", "the model's context is 2048"),
        ({"messages": SAID}, "messages", "unrecognized request argument"),
    ],
)
def test_completion_requests_that_are_refused(server, more, param, says):
    check(server.post(COMPLETIONS, **{**CONTINUED, **more}), 400, param, says)


def test_the_client_sees_the_reason(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=NAME, messages=SAID, temperature=5)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=NAME, prompt="ab " * 3000)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bodies_that_are_no_requests(server, path, body):
    answer = httpx.post(
        server.url + path, content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, (body[:40], answer.text[:200])
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_schemas_that_are_nested_deeply(server):
    for depth in (100, 400, 900, 3000):
        schema = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
        body = json.dumps({**ASKED, "response_format": SCHEMA})
        content = body.replace('{"type": "object"}', schema).encode()
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(server.url + CHAT, content=content, headers=headers, timeout=60)
        assert answer.status_code in ((200, 400) if depth == 100 else (400,)), answer.text


def test_bodies_of_another_type(server):
    says = "send a JSON object, with Content-Type: application/json"
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
    for headers in ({}, form):
        answer = httpx.post(server.url + CHAT, content=json.dumps(ASKED).encode(), headers=headers)
        check(answer, 400, None, says)
    for body in ([], "Hello", 5):
        check(httpx.post(server.url + CHAT, json=body), 400, None, says)
    check(httpx.post(server.url + CHAT, json={}), 400, "messages", "messages is missing")


def test_lone_surrogates(server):
    body = b'{"prompt": "\\ud800", "max_tokens": 2}'
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(server.url + COMPLETIONS, content=body, headers=headers)
    check(answer, 400, "prompt", "not valid UTF-8")
    body = b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}'
    answer = httpx.post(server.url + CHAT, content=body, headers=headers)
    assert answer.status_code == 404


@pytest.mark.parametrize(
    "method, path, status, use",
    [
        ("GET", "/v1/embeddings", 404, ""),
        ("GET", "/docs", 404, ""),
        ("GET", "/openapi.json", 404, ""),
        ("GET", CHAT, 405, "; use POST"),
        ("POST", "/", 405, "; use GET, HEAD"),
        ("GET", "/x", 404, ""),
    ],
)
def test_other_addresses(server, method, path, status, use):
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == f"there is no {method} {path} here{use}"


@pytest.mark.parametrize("path", ["/", "/health", "/about", "/metrics"])
def test_heads_are_answered(server, path):
    answer = httpx.head(server.url + path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["Content-Length"]) > 0


def test_variables_of_the_template(server):
    given = {"tokenizer": 1, "variables": 2, "messages": []}
    assert server.post(CHAT, **ASKED, chat_template_kwargs=given).status_code in (200, 400)

"""Random request bodies: each is answered or refused, and none is a fault of the server.

`make test-server` runs this.
"""

from __future__ import annotations

import json
from collections import Counter

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from token_recycling.server.schemas import ChatRequest, CompletionRequest

pytestmark = pytest.mark.server
BODIES = 2000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([0, 1, 2, -1, 0.5, 1.0, "", "auto", "text", "user", "function"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
schemas = st.recursive(
    st.sampled_from(
        [
            {"type": "object"},
            {"type": "string", "maxLength": 5},
            {"type": "integer", "minimum": 3},
            {"enum": ["a", 1, None]},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            {"type": "string", "pattern": "^(a|b)*$"},
            {"$ref": "#/nowhere"},
            {"type": "flower"},
            {"not": {}},
        ]
    ),
    lambda inner: (
        st.builds(
            lambda name, one, two: {
                "type": "object",
                "properties": {name: one, "b": two},
                "required": [name],
            },
            st.text(max_size=5),
            inner,
            inner,
        )
        | st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner)
    ),
    max_leaves=5,
)
contents = st.text(max_size=60) | st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=9)), max_size=3
)
calls = st.builds(
    lambda name, arguments: {
        "id": "1",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    },
    st.text(max_size=5),
    st.text(max_size=9) | values.map(lambda value: json.dumps(value, default=str)),
)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        "content": contents,
    },
    optional={
        "name": st.text(max_size=5),
        "tool_calls": st.lists(calls, max_size=2),
        "tool_call_id": st.text(max_size=5),
        "reasoning_content": st.text(max_size=5),
    },
)
# Right in themselves, so that combinations are reached too.
likely = {
    "n": st.integers(1, 3),
    "temperature": st.sampled_from([0, 0.7, 2.0]),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 50),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 5),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": st.text(min_size=1, max_size=5) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stream": st.booleans(),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "logit_bias": st.dictionaries(st.integers(0, 4095).map(str), st.integers(-100, 100)),
    "response_format": st.builds(
        lambda schema: {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        schemas,
    ),
    "tools": st.just([FUNCTION])
    | st.builds(
        lambda schema: [
            {"type": "function", "function": {"name": "f", "parameters": schema}},
            {"type": "function", "function": {"name": "g"}},
        ],
        schemas,
    ),
    "tool_choice": st.sampled_from(["none", "auto", "required"]),
    "parallel_tool_calls": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.text(max_size=9), scalars, max_size=2),
    "stream_options": st.just({"include_usage": True, "include_drafts": True}),
}


def bodies(required, fields):
    names = [name for name in fields if name not in required and name != "model"]
    usual = st.sampled_from([name for name in names if name in likely])
    chosen = st.lists(usual, max_size=4, unique=True)
    seldom = st.integers(0, 14).map(lambda number: number == 0)

    @st.composite
    def body(draw):
        made = {"max_tokens": draw(st.integers(1, 6))}
        for name, valid in required.items():
            made[name] = draw(values if draw(seldom) else valid)
        for name in draw(chosen):
            made[name] = draw(values if draw(seldom) else likely[name])
        if draw(seldom):
            made[draw(st.sampled_from(names))] = draw(values)
        if draw(seldom):
            made[draw(st.text(max_size=5))] = draw(values)
        if "stream_options" in made and not draw(seldom):
            made["stream"] = True
        if made.get("top_logprobs") is not None and not draw(seldom):
            made["logprobs"] = True
        if made.get("tools") and not draw(seldom):
            made.pop("response_format", None)
        elif not made.get("tools") and not draw(seldom):
            made.pop("tool_choice", None)
        return made

    return body()


requests = st.one_of(
    st.tuples(
        st.just(CHAT),
        bodies(
            {"messages": st.lists(messages, min_size=1, max_size=3)}, list(ChatRequest.model_fields)
        ),
    ),
    st.tuples(
        st.just(COMPLETIONS),
        bodies(
            {"prompt": st.text(min_size=1, max_size=60) | st.lists(st.integers(0, 4095))},
            list(CompletionRequest.model_fields),
        ),
    ),
    st.tuples(st.sampled_from([CHAT, COMPLETIONS]), st.binary(max_size=40)),
)


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def test_no_body_is_a_fault_of_the_server(client):
    statuses = Counter()

    @settings(
        max_examples=BODIES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests)
    def send(request):
        path, body = request
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
        statuses[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404), answer.text
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["message"]
            assert "\n" not in error["message"]
        elif answer.headers["content-type"].startswith("text/event-stream"):
            assert '"server_error"' not in answer.text
            assert answer.text.endswith("data: [DONE]\n\n") or '"error"' in answer.text
        else:
            assert answer.json()["choices"]

    send()
    print(f"{statuses.total()} bodies: {dict(statuses)}")
    assert statuses[200] > BODIES / 10
    assert statuses[400] > BODIES / 10
    assert client.get("/health").json() == {"status": "ok"}

"""LangChain's ChatOpenAI against the server."""

from __future__ import annotations

from typing import Literal

import pytest

from serving import NAME

pytestmark = pytest.mark.clients
STORY = "Tell me the story of The Fox And The Lantern."


@pytest.fixture
def model(server):
    langchain = pytest.importorskip("langchain_openai")

    def make(**options):
        return langchain.ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            model=NAME,
            **{"temperature": 0, "max_tokens": 60, "max_retries": 0, **options},
        )

    return make


@pytest.fixture
def wanted(recycler):
    return recycler.generate([{"role": "user", "content": STORY}], max_new_tokens=60).text


def test_text_and_usage(model, wanted):
    answer = model().invoke(STORY)
    assert answer.content == wanted
    assert answer.usage_metadata["output_tokens"] == 60
    assert answer.response_metadata["finish_reason"] == "length"


def test_stream(model, wanted):
    parts = list(model(stream_usage=True).stream(STORY))
    assert "".join(part.content for part in parts) == wanted
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == 60


def test_several_at_once(model, wanted):
    answers = model().batch([STORY] * 4)
    assert [answer.content for answer in answers] == [wanted] * 4


def test_stop_seed_and_logprobs(model, wanted):
    assert model(stop_sequences=["the"]).invoke(STORY).content == wanted.split("the")[0]
    sampled = [model(temperature=1.0, seed=7).invoke(STORY).content for _ in range(2)]
    assert sampled[0] == sampled[1]
    found = model(logprobs=True, top_logprobs=2).invoke(STORY).response_metadata["logprobs"]
    assert len(found["content"]) == 60


def test_structured_output(model):
    from pydantic import BaseModel, ConfigDict, Field

    class Person(BaseModel):
        """A person. Without limits, a model as small as this one writes names without end."""

        model_config = ConfigDict(extra="forbid")
        name: str = Field(max_length=12)
        age: int

    for method in ("json_schema", "function_calling"):
        found = model(max_tokens=200).with_structured_output(Person, method=method).invoke(STORY)
        assert isinstance(found, Person)


def test_tools(model):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from pydantic import BaseModel, ConfigDict

    class Zone(BaseModel):
        model_config = ConfigDict(extra="forbid")
        zone: Literal["CET", "UTC"]

    @tool(args_schema=Zone)
    def clock(zone: str) -> str:
        """The time in a zone."""
        return f"noon in {zone}"

    bound = model(max_tokens=300).bind_tools([clock], tool_choice="clock")
    asked = HumanMessage(STORY)
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert call["name"] == "clock"
    assert clock.invoke(call["args"]) in ("noon in CET", "noon in UTC")
    told = ToolMessage(content="noon", tool_call_id=call["id"])
    assert model().bind_tools([clock]).invoke([asked, answer, told]).content

"""OpenAI's client against the server: every field that is served."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serving import NAME

STORY = [{"role": "user", "content": "Tell me the story of The Fox And The Lantern."}]
GREEDY = {"model": NAME, "messages": STORY, "max_tokens": 40, "temperature": 0}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def asked(client):
    return lambda **more: client.chat.completions.create(**{**GREEDY, **more})


def strictly(kind, answer):
    """Check an answer against the types of OpenAI's package, without unknown fields in it."""
    kind.model_validate(answer.model_dump(), strict=True)
    assert not answer.model_extra
    return answer


def test_chat(asked, recycler):
    answer = strictly(ChatCompletion, asked())
    (choice,) = answer.choices
    assert choice.message.content == recycler.generate(STORY, max_new_tokens=40).text
    assert choice.finish_reason == "length"
    usage = answer.usage
    prompt = recycler.tokenizer.apply_chat_template(STORY, add_generation_prompt=True)
    assert usage.prompt_tokens == len(prompt["input_ids"])
    assert usage.completion_tokens == 40
    assert usage.total_tokens == usage.prompt_tokens + 40
    details = usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < 40
    assert details.rejected_prediction_tokens > 0


def test_stream(asked):
    chunks = list(asked(stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == asked().choices[0].message.content
    assert [one.usage is None for one in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].usage.completion_tokens == 40
    assert chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == "length"
    assert len(chunks) < 40  # several tokens a chunk
    assert len({one.id for one in chunks}) == 1
    assert all(one.usage is None for one in asked(stream=True))


def test_completions(client, recycler):
    prompts = ["Once upon a time", "Tom has 12 marbles. He"]
    answer = client.completions.create(model=NAME, prompt=prompts, max_tokens=20, temperature=0)
    strictly(Completion, answer)
    wanted = [recycler.generate(prompt, max_new_tokens=20).text for prompt in prompts]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1]
    ids = recycler.tokenizer(prompts[1]).input_ids
    again = client.completions.create(model=NAME, prompt=ids, temperature=0)
    assert again.usage.completion_tokens == 16  # OpenAI's default
    assert wanted[1].startswith(again.choices[0].text)
    parts = client.completions.create(
        model=NAME, prompt=prompts[0], max_tokens=20, temperature=0, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == wanted[0]


def test_stop(asked):
    whole = asked().choices[0].message.content
    word = whole.split()[4]
    cut = asked(stop=word).choices[0]
    assert cut.message.content == whole[: whole.index(word)]
    assert cut.finish_reason == "stop"
    parts = asked(stop=["nowhere", word], stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == cut.message.content


def test_an_answer_ends_at_the_end_of_the_text(client):
    question = "Tom has 12 marbles. He buys 3 bags with 8 marbles each. How many does he have?"
    answer = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": question}], temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 2000


def test_both_names_of_the_limit(asked):
    answer = asked(max_tokens=None, max_completion_tokens=9)
    assert answer.usage.completion_tokens == 9


def test_sampling(asked):
    def text(**more):
        return asked(**{"temperature": 1.0, "seed": 3, **more}).choices[0].message.content

    assert text() == text() != text(seed=4)
    assert text(top_p=1e-6) == asked().choices[0].message.content
    assert text(extra_body={"top_k": 1}) == asked().choices[0].message.content
    assert text(extra_body={"min_p": 1.0}) == asked().choices[0].message.content
    several = [choice.message.content for choice in asked(temperature=1, seed=3, n=3).choices]
    assert several == [text(), text(seed=4), text(seed=5)]


def test_penalties(asked, recycler):
    """A token that has occurred n times loses presence + n times frequency, prompts apart."""
    import torch

    def plain(presence, frequency):
        ids = recycler.tokenizer.apply_chat_template(STORY, add_generation_prompt=True)["input_ids"]
        answer: list[int] = []
        with torch.no_grad():
            while len(answer) < 24:
                logits = recycler.model(torch.tensor([ids + answer])).logits[0, -1].float()
                for token in set(answer):
                    logits[token] -= presence + frequency * answer.count(token)
                answer.append(int(logits.argmax()))
        return recycler.tokenizer.decode(answer, skip_special_tokens=True)

    unpenalised = asked(max_tokens=24).choices[0].message.content
    for presence, frequency in ((1.5, 0.0), (0.0, 0.7), (0.4, 1.1), (-1.0, 0.0)):
        found = asked(max_tokens=24, presence_penalty=presence, frequency_penalty=frequency)
        assert found.choices[0].message.content == plain(presence, frequency)
        assert presence < 0 or found.choices[0].message.content != unpenalised


def test_logit_bias(asked, recycler):
    (token,) = recycler.tokenizer(" fox", add_special_tokens=False).input_ids[:1]
    forced = asked(logit_bias={str(token): 100}, max_tokens=5).choices[0].message.content
    assert forced == recycler.tokenizer.decode([token] * 5)
    first = asked(max_tokens=1).choices[0].message.content
    (banned,) = recycler.tokenizer(first, add_special_tokens=False).input_ids
    assert asked(logit_bias={str(banned): -100}).choices[0].message.content[:1] != first[:1]


def test_logprobs(asked, recycler):
    import torch

    answer = asked(logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert bytes(b for one in entries for b in one.bytes).decode() == "".join(
        one.token for one in entries
    )
    ids = recycler.tokenizer.apply_chat_template(STORY, add_generation_prompt=True)["input_ids"]
    given = recycler.generate(STORY, max_new_tokens=40).token_ids
    with torch.no_grad():
        logits = recycler.model(torch.tensor([ids + given])).logits[0, len(ids) - 1 : -1]
    wanted = logits.log_softmax(dim=-1)
    for position, entry in enumerate(entries):
        assert math.isclose(entry.logprob, float(wanted[position, given[position]]), abs_tol=1e-3)
        best = wanted[position].topk(3).values.tolist()
        assert [one.logprob for one in entry.top_logprobs] == pytest.approx(best, abs=1e-3)
        assert entry.top_logprobs[0].token == entry.token  # greedy
    parts = [one for one in asked(logprobs=True, stream=True) if one.choices[0].logprobs]
    streamed = [entry.token for one in parts for entry in one.choices[0].logprobs.content]
    assert streamed == [entry.token for entry in entries]
    assert asked(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_logprobs_of_completions(client):
    options = dict(model=NAME, prompt="Once upon a time", max_tokens=12, temperature=0, logprobs=2)
    choice = client.completions.create(**options).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 12
    assert found.text_offset[0] == 0
    assert choice.text[found.text_offset[5] :].startswith(found.tokens[5])
    parts = list(client.completions.create(**options, stream=True))
    offsets = [
        at
        for part in parts
        if part.choices[0].logprobs
        for at in part.choices[0].logprobs.text_offset
    ]
    assert offsets == found.text_offset


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.2])
def test_json_schema(client, stream, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
    options = {**GREEDY, "max_tokens": 200, "temperature": temperature, "seed": 8}
    answer = client.chat.completions.create(**options, response_format=form, stream=stream)
    if stream:
        text = "".join(part.choices[0].delta.content or "" for part in answer)
    else:
        text = answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
    found = json.loads(text)
    assert set(found) == {"name", "age"}
    assert isinstance(found["age"], int)
    assert len(found["name"]) <= 12


def test_json_object(asked):
    text = asked(response_format={"type": "json_object"}, max_tokens=300).choices[0].message.content
    assert text.startswith("{")


def test_drafts_are_accepted_below_a_grammar(asked):
    """A grammar costs no accepted tokens of its own: drafts are verified as without one."""
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "p",
            "schema": {
                "type": "object",
                "properties": {
                    "numbers": {
                        "type": "array",
                        "items": {"const": 7},
                        "minItems": 40,
                        "maxItems": 40,
                    }
                },
                "required": ["numbers"],
                "additionalProperties": False,
            },
        },
    }
    usage = asked(response_format=form, max_tokens=400).usage
    assert usage.completion_tokens_details.accepted_prediction_tokens > usage.completion_tokens / 3


def test_the_example_of_the_docs(server, capsys):
    docs = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", docs, re.S)
    model = "SmolLM2-135M-Instruct-float32"
    for old, new in (("http://127.0.0.1:8000", server.url), (model, NAME)):
        assert old in example
        example = example.replace(old, new)
    exec(example, {})
    assert len(capsys.readouterr().out) > 100


@pytest.mark.parametrize("stream", [False, True])
def test_forced_tool_calls(client, stream):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    options = {**GREEDY, "max_tokens": 200, "tools": [CLOCK, WEATHER], "tool_choice": choice}
    calls = answered_calls(client, options, stream)
    (call,) = calls
    assert call["name"] == "get_weather"
    found = json.loads(call["arguments"])
    assert found["city"] in ("Paris", "Oslo")
    assert 1 <= found["days"] <= 9


def answered_calls(client, options, stream):
    answer = client.chat.completions.create(**options, stream=stream)
    if not stream:
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        return [call.function.model_dump() for call in choice.message.tool_calls]
    calls, reasons = {}, []
    for part in answer:
        (choice,) = part.choices
        reasons.append(choice.finish_reason)
        assert "<tool_call>" not in (choice.delta.content or "")
        for call in choice.delta.tool_calls or []:
            assert call.id.startswith("call_")
            calls[call.index] = call.function.model_dump()
    assert reasons[-1] == "tool_calls"
    return list(calls.values())


def test_required_tool_calls(client):
    options = {**GREEDY, "max_tokens": 300, "tools": [WEATHER], "tool_choice": "required"}
    found = answered_calls(client, {**options, "parallel_tool_calls": False}, False)
    assert [call["name"] for call in found] == ["get_weather"]


def test_tool_calls_that_are_cut_off(asked):
    (choice,) = asked(tools=[WEATHER], tool_choice="required", max_tokens=100).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls
    assert not choice.message.content


def test_tools_that_are_not_called(asked):
    answer = asked(tools=[WEATHER]).choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content
    assert answer.finish_reason == "length"
    none = asked(tools=[WEATHER], tool_choice="none").choices[0]
    assert none.message.content == asked().choices[0].message.content


def test_a_conversation_with_tool_calls(asked):
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 1}'},
    }
    messages = [
        *STORY,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    assert asked(messages=messages, tools=[WEATHER]).choices[0].message.content is not None


def test_an_answer_can_be_sent_back(asked):
    answer = asked()
    again = asked(messages=[*STORY, answer.choices[0].message.model_dump(), *STORY])
    assert again.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens


def test_parts_of_messages(asked):
    text = STORY[0]["content"]
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
    given = asked(messages=[{"role": "user", "content": parts}])
    assert given.choices[0].message.content == asked().choices[0].message.content


def test_the_asynchronous_client(server):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(**GREEDY) for _ in range(5))
            )
            stream = await client.chat.completions.create(**GREEDY, stream=True)
            text = "".join([part.choices[0].delta.content or "" async for part in stream])
            return [answer.choices[0].message.content for answer in answers], text

    texts, streamed = asyncio.run(run())
    assert set(texts) == {streamed}


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == NAME
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_which_tokens_were_drafted(asked):
    chunks = list(asked(stream=True, stream_options={"include_drafts": True}))
    ours = [one.model_extra["token_recycling"] for one in chunks if one.model_extra]
    drafts = [tuple(token) for one in ours for token in one.get("drafts", [])]
    answer = asked()
    assert "".join(piece for piece, _ in drafts) == answer.choices[0].message.content
    assert len(drafts) == 40
    assert drafts[0][1] is False
    assert 0 < sum(drafted for _, drafted in drafts) < 40
    assert ours[-1]["mat"] > 1
    assert ours[-1]["tokens_per_second"] > 1


def test_metrics(server, asked):
    asked()
    lines = server.get("/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_bucket",
        "e2e_request_latency_seconds_sum",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "prefix_cache_hits_total",
        "request_success_total",
        "request_mean_accepted_tokens_bucket",
    ):
        assert f"token_recycling:{name}{{" in lines
    before = server.metric("generation_tokens_total")
    accepted = server.metric("spec_decode_num_accepted_tokens_total")
    usage = asked().usage
    assert server.metric("generation_tokens_total") - before == usage.completion_tokens
    details = usage.completion_tokens_details
    assert server.metric("spec_decode_num_accepted_tokens_total") - accepted == (
        details.accepted_prediction_tokens
    )


def test_health(server):
    assert server.get("/health").json() == {"status": "ok"}

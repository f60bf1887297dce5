"""Calls of foreign clients against a running server: prints a table of calls and outcomes.

    python -m venv build/foreign
    build/foreign/bin/pip install openai litellm llm instructor 'pydantic-ai-slim[openai]'
    token-recycling serve FOLDER --port 8123 &
    build/foreign/bin/python lab/foreign_clients.py http://127.0.0.1:8123/v1

Needs nothing of this project. "equal": the text is that of the first call, ``openai`` without a
stream. Exits with 1 if a call fails.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import instructor

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download
import litellm
from openai import AsyncOpenAI, BadRequestError, OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

warnings.simplefilter("ignore")
URL = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
KEY = os.environ.get("TOKEN_RECYCLING_API_KEY", "none")
QUESTION = "Name three colours of the rainbow."
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 40,
    "temperature": 0,
}
litellm.suppress_debug_info = True


class Person(BaseModel):
    """What the structured calls ask for."""

    name: str
    age: int


ABOUT = {"role": "user", "content": "Anna is 34 years old. Answer with her name and age as JSON."}
client, later = OpenAI(base_url=URL, api_key=KEY), AsyncOpenAI(base_url=URL, api_key=KEY)
MODEL = client.models.list().data[0].id
create = partial(client.chat.completions.create, model=MODEL)
EXPECTED = create(**ASKED).choices[0].message.content


def equal(text: str | None) -> str:
    assert text is not None
    assert text.strip() == EXPECTED.strip(), f"another text: {text!r}"
    return "equal"


def person(found: Person) -> str:
    assert isinstance(found, Person)
    return f"{found!r}"[:60]


def streamed(chunks: Any) -> str:
    return equal("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))


async def eight_at_once() -> str:
    calls = [later.chat.completions.create(model=MODEL, **ASKED) for _ in range(8)]
    return {equal(c.choices[0].message.content) for c in await asyncio.gather(*calls)}.pop()


def parse() -> str:
    call = client.chat.completions.parse
    found = call(model=MODEL, messages=[ABOUT], response_format=Person, max_tokens=60)
    return person(found.choices[0].message.parsed)


def refused() -> str:
    try:
        create(**{**ASKED, "temperature": 9})
    except BadRequestError as error:
        return f"400: {error.body['message']}"[:60]  # type: ignore[index]
    raise AssertionError("not refused")


def lite(**options: Any) -> Any:
    return litellm.completion(f"openai/{MODEL}", api_base=URL, api_key=KEY, **(ASKED | options))


def lite_schema() -> str:
    found = lite(messages=[ABOUT], response_format=Person, max_tokens=60)
    return person(Person.model_validate_json(found.choices[0].message.content))


def llm() -> str:
    with tempfile.TemporaryDirectory() as folder:
        entry = f"model_id: ours, model_name: {MODEL}, api_base: {URL}, api_key_name: ours"
        Path(folder, "extra-openai-models.yaml").write_text(f"- {{{entry}}}\n")
        command: list[Any] = [Path(sys.executable).with_name("llm"), "-m", "ours", "--key", KEY]
        command += ["-o", "max_tokens", "40", "-o", "temperature", "0", QUESTION]
        environment = os.environ | {"LLM_USER_PATH": folder}
        found = subprocess.run(
            command, timeout=300, env=environment, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stderr[-200:]
        return equal(found.stdout)


def instruct(mode: instructor.Mode) -> str:
    wrapped = instructor.from_openai(client, mode=mode).chat.completions.create
    options = {"max_tokens": 80, "temperature": 0, "max_retries": 0}
    return person(wrapped(model=MODEL, messages=[ABOUT], response_model=Person, **options))


def agent(question: Any, **options: Any) -> Any:
    provider = OpenAIProvider(base_url=URL, api_key=KEY)
    settings = {"max_tokens": 60 if options else 40, "temperature": 0.0}
    asked = Agent(OpenAIChatModel(MODEL, provider=provider), model_settings=settings, **options)
    return asked.run_sync(question).output


CALLS: dict[tuple[str, str], Callable[[], Any]] = {
    ("openai", "chat, stream"): lambda: streamed(create(stream=True, **ASKED)),
    ("openai", "eight at once"): lambda: asyncio.run(eight_at_once()),
    ("openai", "completions.parse with a Pydantic model"): parse,
    ("openai", "temperature 9"): refused,
    ("litellm", "completion"): lambda: equal(lite().choices[0].message.content),
    ("litellm", "stream"): lambda: streamed(lite(stream=True)),
    ("litellm", "response_format with a Pydantic model"): lite_schema,
    ("llm", "prompt, streamed"): llm,
    **{
        ("instructor", mode.name): partial(instruct, mode)
        for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON, instructor.Mode.TOOLS)
    },
    ("pydantic-ai", "run"): lambda: equal(agent(QUESTION)),
    ("pydantic-ai", "NativeOutput"): lambda: person(
        agent(ABOUT["content"], output_type=NativeOutput(Person))
    ),
    ("pydantic-ai", "output by a tool"): lambda: person(
        agent(ABOUT["content"], output_type=Person)
    ),
}


def main() -> int:
    """Run all calls; print a table."""
    failed = 0
    print(f"| client | call | outcome with {MODEL} |\n|---|---|---|")
    for (name, what), call in CALLS.items():
        try:
            outcome = call()
        except Exception as error:
            if "tools are not supported: this model" in str(error):
                outcome = "refused by name: the model has no tool calls"
            else:
                failed += 1
                outcome = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"| {name} | {what} | {outcome} |", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

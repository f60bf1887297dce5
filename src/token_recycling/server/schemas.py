"""What a request may contain: OpenAI's fields, those of vLLM that clients use, and limits.

A field is served, accepted without effect, or refused with a reason. Nothing is ignored.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CHOICES = 16
MOST_LOGPROBS, MOST_LEGACY_LOGPROBS = 20, 5
MOST_STOPS = 16
MOST_TOKENS = 2**31

# Accepted without effect: they concern OpenAI's accounts and storage, or are hints.
WITHOUT_EFFECT_COMPLETION = ("user",)
WITHOUT_EFFECT_CHAT = (
    *("user", "metadata", "safety_identifier", "service_tier", "store"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
# Refused, except for values that ask for nothing; and why.
REFUSED_CHAT: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), "only text is generated"),
    "modalities": ((["text"],), "only text is generated"),
    "function_call": (("none",), "it is deprecated; use tool_choice"),
    "functions": (([],), "it is deprecated; use tools"),
    "moderation": ((), "there is no moderation"),
    "prediction": ((), "drafts come from the model itself"),
    "verbosity": (("medium",), "models have no such setting"),
    "web_search_options": ((), "there is no web search"),
}
REFUSED_COMPLETION: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((False,), "the client has the prompt"),
    "suffix": (("",), "text cannot be inserted"),
}

# Fields of answers that clients send back in the messages of the next turn.
ANSWER_FIELDS = ("refusal", "reasoning_content", "annotations", "audio")


class _FieldError(ValueError):
    """A value that contradicts another one, or is not supported.

    Attributes:
        field: the field at fault.
    """

    def __init__(self, field: str, message: str) -> None:
        """Describe the error in one line."""
        super().__init__(message)
        self.field = field


Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Stops = str | list[str]
Json = dict[str, Any]


class Strict(BaseModel):
    """An object without unknown fields, whose values have the right types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: nothing is padded
    # Ours: tells in every chunk which of its tokens were drafted.
    include_drafts: bool | None = None


class SamplingFields(Strict):
    """The fields that both endpoints have."""

    model: str | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = (
        None
    )
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    # Those of vLLM
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, if given."""
        return self.max_tokens

    @model_validator(mode="after")
    def _check_common(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise _FieldError("stream_options", "stream_options needs stream: true")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS or not all(stops):
            raise _FieldError("stop", f"stop takes 1 to {MOST_STOPS} strings that are not empty")
        for token in self.logit_bias or {}:
            if not re.fullmatch("0|[1-9][0-9]{0,8}", token):
                raise _FieldError(
                    "logit_bias", f"logit_bias: {json.dumps(token)} is not a token id"
                )
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def _served(
    given: Any, refused: dict[str, tuple[tuple[Any, ...], str]], without_effect: tuple[str, ...]
) -> Any:
    """Return the fields that are served.

    Raises:
        ValueError: a field asks for what is refused.
    """
    if not isinstance(given, dict):
        return given
    served = {name: value for name, value in given.items() if name not in without_effect}
    for name, (neutral, reason) in refused.items():
        value = served.pop(name, None)
        if value is not None and value not in neutral:
            raise _FieldError(name, f"{name} is not supported: {reason}")
    return served


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str
    cache_control: Any = None  # without effect: what is kept does not depend on it

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") != "text":
            raise ValueError("only parts with type: text are supported")
        return given


class CalledFunction(Strict):
    """A function as it was called."""

    name: str
    arguments: str


class PastToolCall(Strict):
    """A call of a tool in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # of a call that was streamed; without effect


class Message(BaseModel):
    """A message; other fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing")
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in ANSWER_FIELDS:
                raise ValueError(f"unknown field {json.dumps(name)}")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content or ""}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        reasoning = (self.model_extra or {}).get("reasoning_content")
        if isinstance(reasoning, str):
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call)},
                }
                for call in self.tool_calls
            ]
        return message


def _arguments(call: PastToolCall) -> Any:
    """Return the arguments as an object, as templates write them as JSON themselves."""
    try:
        return json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        return call.function.arguments


class Function(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None  # arguments always satisfy the schema


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """A schema with its name."""

    name: str
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None  # answers always satisfy the schema


class ResponseFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and type: json_schema belong together")
        return self


class ChatRequest(SamplingFields):
    """A request for ``/v1/chat/completions``."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    max_completion_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Without effect if the model's template has no such variable.
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    # That of vLLM
    chat_template_kwargs: Json | None = None

    @model_validator(mode="before")
    @classmethod
    def _select(cls, given: Any) -> Any:
        return _served(given, REFUSED_CHAT, WITHOUT_EFFECT_CHAT)

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if not self.messages:
            raise _FieldError("messages", "messages is empty")
        if self.top_logprobs is not None and not self.logprobs:
            raise _FieldError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.max_tokens and self.max_completion_tokens:
            raise _FieldError(
                "max_tokens", "max_tokens is the old name of max_completion_tokens; give one"
            )
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise _FieldError("tools", "tools: two functions have the same name")
        if self.tool_choice not in (None, "none") and not names:
            raise _FieldError("tool_choice", "tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise _FieldError("tool_choice", "tool_choice names a function that is not in tools")
        if self.calls and self.response_format and self.response_format.type != "text":
            raise _FieldError(
                "response_format",
                "response_format and tools cannot be combined; set tool_choice: none",
            )
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, if given."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def calls(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def tools_json(self) -> list[Json]:
        """The tools that the answer may call, as JSON."""
        tools = self.tools if self.calls else None
        return [tool.model_dump(exclude_none=True) for tool in tools or []]


class CompletionRequest(SamplingFields):
    """A request for ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LEGACY_LOGPROBS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _select(cls, given: Any) -> Any:
        return _served(given, REFUSED_COMPLETION, WITHOUT_EFFECT_COMPLETION)

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise _FieldError("best_of", "best_of is not supported: answers are not ranked; use n")
        if self.prompt == []:
            raise _FieldError("prompt", "prompt is empty")
        if len(self.prompts) * (self.n or 1) > MOST_CHOICES:
            raise _FieldError("n", f"prompts times n may be at most {MOST_CHOICES}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a string or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

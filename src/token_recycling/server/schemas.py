"""What a request may contain: OpenAI's fields, those of vLLM that clients use, and limits.

A field is served, accepted without effect, or refused with a reason. Nothing is ignored. Numbers of
elements are checked before the elements, and the first wrong element ends the checks: a body may
have half a million of them.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from token_recycling.server.json_limits import JsonLimitError, loads

MOST_CHOICES = 16
MOST_LOGPROBS, MOST_LEGACY_LOGPROBS = 20, 5
MOST_STOPS = 16
MOST_TOOLS = 128
MOST_MESSAGES = 2**14
MOST_PARTS = 1024
MOST_CHARACTERS = 2**17  # of the tools of a request, a schema, or variables of a template, as JSON
MOST_BIASES = 4096
LARGEST_COUNT = 2**31

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
A_PROMPT = "input should be a string, token ids, or a list of one or the other"


class _FieldError(ValueError):
    """A value that contradicts another one, or is not supported.

    Attributes:
        field: the field at fault.
    """

    def __init__(self, field: str, message: str) -> None:
        """Describe the error in one line."""
        super().__init__(message)
        self.field = field


class ContextError(_FieldError):
    """A prompt that is longer than the model's context."""


class UnknownFieldError(ValueError):
    """A field that does not exist.

    Attributes:
        name: of the field.
    """

    def __init__(self, name: str) -> None:
        """Name the field."""
        super().__init__("unknown field")
        self.name = name


def _at_most(most: int, what: str) -> BeforeValidator:
    """Return a validator that refuses longer lists and objects before it looks at elements."""

    def check(given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, (list, dict)) and len(given) > most:
            name = str(info.field_name)
            raise _FieldError(name, f"{name} has {len(given)} {what}; at most {most} are possible")
        return given

    return BeforeValidator(check)


def _is_short(given: Any, info: ValidationInfo) -> Any:
    """Refuse JSON that is longer than ``MOST_CHARACTERS``."""
    size = len(json.dumps(given, ensure_ascii=False, separators=(",", ":")))
    if size > MOST_CHARACTERS:
        name = str(info.field_name)
        limit = f"at most {MOST_CHARACTERS} are possible"
        raise _FieldError(name, f"{name} has {size} characters; {limit}")
    return given


SHORT = BeforeValidator(_is_short)
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Stops = str | Annotated[list[str], Field(fail_fast=True)]
Json = dict[str, Any]


class Strict(BaseModel):
    """An object without unknown fields, whose values have the right types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, given: Any) -> Any:
        """Refuse the first unknown field, before pydantic describes them all."""
        if isinstance(given, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in given:
                if name not in known:
                    raise UnknownFieldError(name)
        return given


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
    logit_bias: Annotated[dict[str, Bias] | None, _at_most(MOST_BIASES, "entries")] = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Stops | None, _at_most(MOST_STOPS, "strings")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    # Those of vLLM
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_COUNT)] | None = None
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
        if not all(self.stops) or self.stop == "":
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

    @field_validator("arguments")
    @classmethod
    def _is_within_limits(cls, given: str) -> str:
        _arguments(given)
        return given


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
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)] | None, _at_most(MOST_PARTS, "parts")
    ] = None
    name: str | None = None
    tool_calls: Annotated[
        Annotated[list[PastToolCall], Field(fail_fast=True)] | None, _at_most(MOST_TOOLS, "calls")
    ] = None
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
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(call.function.arguments),
                    },
                }
                for call in self.tool_calls
            ]
        return message


def _arguments(text: str) -> Any:
    """Return the arguments of a call as an object, as templates write them as JSON themselves.

    Raises:
        ValueError: they are beyond the limits for JSON.
    """
    try:
        return loads(text.encode(errors="surrogatepass"))
    except JsonLimitError as error:
        raise ValueError(f"the JSON {error}") from error
    except ValueError:
        return text


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

    messages: Annotated[list[Message], Field(fail_fast=True), _at_most(MOST_MESSAGES, "messages")]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    max_completion_tokens: Count | None = None
    response_format: Annotated[ResponseFormat | None, SHORT] = None
    tools: Annotated[
        Annotated[list[Tool], Field(fail_fast=True)] | None,
        _at_most(MOST_TOOLS, "tools"),
        SHORT,
    ] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Without effect if the model's template has no such variable.
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    # That of vLLM
    chat_template_kwargs: Annotated[Json | None, SHORT] = None

    @model_validator(mode="before")
    @classmethod
    def _select(cls, given: Any) -> Any:
        return _served(given, REFUSED_CHAT, WITHOUT_EFFECT_CHAT)

    @field_validator("messages", mode="before")
    @classmethod
    def _fit(cls, given: Any, info: ValidationInfo) -> Any:
        """Refuse more messages than there is room for tokens."""
        if isinstance(given, list):
            _check_fits(len(given), "messages", info)
        return given

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


def _prompts(given: Any, info: ValidationInfo) -> list[str | list[int]]:
    """Return the prompts, each a string or token ids, of one or several of them.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list):
        raise _FieldError("prompt", f"prompt: {A_PROMPT}")
    if not given:
        raise _FieldError("prompt", "prompt is empty")
    if type(given[0]) is int:
        _check_ids(given, "prompt", info)
        return [given]
    if len(given) > MOST_CHOICES:
        many = f"prompt has {len(given)} prompts; at most {MOST_CHOICES} are possible"
        raise _FieldError("prompt", many)
    kind = type(given[0])
    if kind not in (str, list):
        raise _FieldError("prompt.0", f"prompt.0: {A_PROMPT}")
    for index, prompt in enumerate(given):
        if not isinstance(prompt, kind):
            wanted = "a valid string" if kind is str else "a list of token ids"
            raise _FieldError(f"prompt.{index}", f"prompt.{index}: input should be {wanted}")
        if isinstance(prompt, list):
            _check_ids(prompt, f"prompt.{index}", info)
    return given


def _check_ids(ids: list[Any], where: str, info: ValidationInfo) -> None:
    """Refuse lists that are longer than the context, or hold something else than integers."""
    _check_fits(len(ids), "prompt", info)
    if set(map(type, ids)) <= {int}:
        return
    index = next(index for index, token in enumerate(ids) if type(token) is not int)
    name = f"{where}.{index}"
    raise _FieldError(name, f"{name}: input should be a valid integer")


def _check_fits(count: int, name: str, info: ValidationInfo) -> None:
    """Refuse more than the model's context, which is the ``context`` of the validation."""
    most = (info.context or {}).get("tokens")
    if most is not None and count >= most:
        what = "messages" if name == "messages" else "tokens"
        raise ContextError(name, f"the prompt has {count} {what}; the model's context is {most}")


class CompletionRequest(SamplingFields):
    """A request for ``/v1/completions``."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
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
        if len(self.prompt) * (self.n or 1) > MOST_CHOICES:
            raise _FieldError("n", f"prompts times n may be at most {MOST_CHOICES}")
        return self

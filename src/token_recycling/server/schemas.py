"""What a request may contain: OpenAI's fields, those of vLLM that clients use, and limits.

A field is served, accepted without effect, or refused with a reason. Nothing is ignored. Numbers of
elements are checked before the elements, and the first wrong element ends the checks: a body may
have half a million of them.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

from token_recycling.server.json_limits import JsonLimitError, loads
from token_recycling.server.tools import Json

MOST_CHOICES = 16
MOST_LOGPROBS, MOST_LEGACY_LOGPROBS = 20, 5
MOST_STOPS, MOST_TOOLS = 16, 128
MOST_MESSAGES, MOST_PARTS = 2**14, 1024
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
Refused = dict[str, tuple[tuple[Any, ...], str]]
REFUSED_CHAT: Refused = {
    "audio": ((), "only text is generated"),
    "modalities": ((["text"],), "only text is generated"),
    "function_call": (("none",), "it is deprecated; use tool_choice"),
    "functions": (([],), "it is deprecated; use tools"),
    "moderation": ((), "there is no moderation"),
    "prediction": ((), "drafts come from the model itself"),
    "verbosity": (("medium",), "models have no such setting"),
    "web_search_options": ((), "there is no web search"),
}
REFUSED_COMPLETION: Refused = {
    "echo": ((False,), "the client has the prompt"),
    "suffix": (("",), "text cannot be inserted"),
}

# Fields of answers that clients send back in the messages of the next turn.
ANSWER_FIELDS = ("refusal", "reasoning_content", "annotations", "audio")
A_PROMPT = "input should be a string, token ids, or a list of one or the other"


class FieldError(ValueError):
    """A field that contradicts another one, is not supported or does not exist.

    Attributes:
        field: the field at fault.
        code: OpenAI's ``code``.
        is_unknown: True if the object that is checked has no such ``field``.
    """

    def __init__(
        self, field: str, message: str, *, code: str | None = None, is_unknown: bool = False
    ) -> None:
        """Describe the error in one line."""
        super().__init__(message)
        self.field, self.code, self.is_unknown = field, code, is_unknown


def _check_count(count: int, most: int, what: str, info: ValidationInfo) -> None:
    """Refuse a field with more than ``most`` of ``what``."""
    if count > most:
        name = str(info.field_name)
        raise FieldError(name, f"{name} has {count} {what}; at most {most} are possible")


def _at_most(most: int, what: str) -> BeforeValidator:
    """Return a validator that refuses longer lists and objects before it looks at elements."""

    def check(given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, (list, dict)):
            _check_count(len(given), most, what, info)
        return given

    return BeforeValidator(check)


def _is_short(given: Any, info: ValidationInfo) -> Any:
    """Refuse JSON that is longer than ``MOST_CHARACTERS``."""
    size = len(json.dumps(given, ensure_ascii=False, separators=(",", ":")))
    _check_count(size, MOST_CHARACTERS, "characters", info)
    return given


SHORT, FAST = BeforeValidator(_is_short), Field(fail_fast=True)
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Strict(BaseModel):
    """An object without unknown fields, whose values have the right types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, given: Any) -> Any:
        """Refuse the first unknown field, before pydantic describes them all."""
        if isinstance(given, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in given:
                if name not in known:
                    raise FieldError(name, "unknown field", is_unknown=True)
        return given


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: nothing is padded
    include_drafts: bool | None = None  # ours: every chunk says which of its tokens were drafted


class SamplingFields(_Strict):
    """The fields that both endpoints have."""

    refused: ClassVar[Refused]
    without_effect: ClassVar[tuple[str, ...]]
    model: str | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias] | None, _at_most(MOST_BIASES, "entries")] = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[str | Annotated[list[str], FAST] | None, _at_most(MOST_STOPS, "strings")] = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # Those of vLLM
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _select(cls, given: Any) -> Any:
        """Leave out fields without effect, and those that ask for nothing; refuse the others."""
        if not isinstance(given, dict):
            return given
        served = {name: value for name, value in given.items() if name not in cls.without_effect}
        for name, (neutral, reason) in cls.refused.items():
            value = served.pop(name, None)
            if value is not None and value not in neutral:
                raise FieldError(name, f"{name} is not supported: {reason}")
        return served

    @model_validator(mode="after")
    def _check_common(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options needs stream: true")
        if not all(self.stops) or self.stop == "":
            raise FieldError("stop", f"stop takes 1 to {MOST_STOPS} strings that are not empty")
        for token in self.logit_bias or {}:
            if not re.fullmatch("0|[1-9][0-9]{0,8}", token):
                raise FieldError("logit_bias", f"logit_bias: {json.dumps(token)} is not a token id")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, if given."""
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class _TextPart(_Strict):
    type: Literal["text"]
    text: str
    cache_control: Any = None  # without effect: what is kept does not depend on it

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") != "text":
            raise ValueError("only parts with type: text are supported")
        return given


def _arguments(text: str) -> Any:
    """Return the arguments of a call as an object if they are JSON.

    Raises:
        ValueError: they are beyond the limits for JSON.
    """
    try:
        return loads(text.encode(errors="surrogatepass"))
    except JsonLimitError as error:
        raise ValueError(f"the JSON {error}") from error
    except ValueError:
        return text


class _CalledFunction(_Strict):
    name: str
    # An object after validation, as templates write it as JSON themselves.
    arguments: Annotated[str, AfterValidator(_arguments)]


class _PastToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None  # of a call that was streamed; without effect


class _Message(BaseModel):
    """A message; of other fields only ``ANSWER_FIELDS`` may have a value."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[_TextPart], FAST] | None, _at_most(MOST_PARTS, "parts")
    ] = None
    name: str | None = None
    tool_calls: Annotated[
        Annotated[list[_PastToolCall], FAST] | None, _at_most(MOST_TOOLS, "calls")
    ] = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> _Message:
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
                {"id": call.id, "type": "function", "function": dict(call.function)}
                for call in self.tool_calls
            ]
        return message


class _Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None  # arguments always satisfy the schema


class _Tool(_Strict):
    type: Literal["function"]
    function: _Function


class _FunctionName(_Strict):
    name: str


class _NamedTool(_Strict):
    type: Literal["function"]
    function: _FunctionName


class _JsonSchema(_Strict):
    name: str
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None  # answers always satisfy the schema


class _ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> _ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema and type: json_schema belong together")
        return self


def _check_fits(count: int, name: str, info: ValidationInfo) -> None:
    """Refuse more than the model's context, which is the ``context`` of the validation."""
    most = (info.context or {}).get("tokens")
    if most is not None and count >= most:
        what = "messages" if name == "messages" else "tokens"
        message = f"the prompt has {count} {what}; the model's context is {most}"
        raise FieldError(name, message, code="context_length_exceeded")


def _messages_fit(given: Any, info: ValidationInfo) -> Any:
    """Refuse more messages than there is room for tokens."""
    if isinstance(given, list):
        _check_fits(len(given), "messages", info)
    return given


class ChatRequest(SamplingFields):
    """A request for ``/v1/chat/completions``."""

    refused, without_effect = REFUSED_CHAT, WITHOUT_EFFECT_CHAT
    messages: Annotated[
        list[_Message], FAST, _at_most(MOST_MESSAGES, "messages"), BeforeValidator(_messages_fit)
    ]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    max_completion_tokens: Count | None = None
    response_format: Annotated[_ResponseFormat | None, SHORT] = None
    tools: Annotated[Annotated[list[_Tool], FAST] | None, _at_most(MOST_TOOLS, "tools"), SHORT] = (
        None
    )
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None  # without effect if the template does not use it
    chat_template_kwargs: Annotated[Json | None, SHORT] = None  # that of vLLM

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if not self.messages:
            raise FieldError("messages", "messages is empty")
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.max_tokens and self.max_completion_tokens:
            raise FieldError(
                "max_tokens", "max_tokens is the old name of max_completion_tokens; give one"
            )
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise FieldError("tools", "tools: two functions have the same name")
        if self.tool_choice not in (None, "none") and not names:
            raise FieldError("tool_choice", "tool_choice needs tools")
        if self.named is not None and self.named not in names:
            raise FieldError("tool_choice", "tool_choice names a function that is not in tools")
        if self.calls and self.response_format and self.response_format.type != "text":
            raise FieldError(
                "response_format",
                "response_format and tools cannot be combined; set tool_choice: none",
            )
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer, if given."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def named(self) -> str | None:
        """The name of the function that must be called, if one is given."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, _NamedTool) else None

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
        raise FieldError("prompt", f"prompt: {A_PROMPT}")
    if not given:
        raise FieldError("prompt", "prompt is empty")
    if type(given[0]) is int:
        _check_ids(given, "prompt", info)
        return [given]
    _check_count(len(given), MOST_CHOICES, "prompts", info)
    kind = type(given[0])
    if kind not in (str, list):
        raise FieldError("prompt.0", f"prompt.0: {A_PROMPT}")
    for index, prompt in enumerate(given):
        if not isinstance(prompt, kind):
            wanted = "a valid string" if kind is str else "a list of token ids"
            raise FieldError(f"prompt.{index}", f"prompt.{index}: input should be {wanted}")
        if isinstance(prompt, list):
            _check_ids(prompt, f"prompt.{index}", info)
    return given


def _check_ids(ids: list[Any], where: str, info: ValidationInfo) -> None:
    """Refuse lists that are longer than the context, or hold something else than integers."""
    _check_fits(len(ids), "prompt", info)
    for index, token in enumerate(ids):
        if type(token) is not int:
            name = f"{where}.{index}"
            raise FieldError(name, f"{name}: input should be a valid integer")


class CompletionRequest(SamplingFields):
    """A request for ``/v1/completions``."""

    refused, without_effect = REFUSED_COMPLETION, WITHOUT_EFFECT_COMPLETION
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LEGACY_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise FieldError("best_of", "best_of is not supported: answers are not ranked; use n")
        if len(self.prompt) * (self.n or 1) > MOST_CHOICES:
            raise FieldError("n", f"prompts times n may be at most {MOST_CHOICES}")
        return self

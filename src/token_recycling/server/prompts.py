"""Requests as prompts, options and logits processors of the decoding loop."""

from __future__ import annotations

import copy
import inspect
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any

from llguidance import LLMatcher
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from token_recycling.decoding.text import render, valid_text
from token_recycling.errors import TokenRecyclingError
from token_recycling.hf.call import CallOptions
from token_recycling.recycler import TokenRecycling
from token_recycling.server.errors import ApiError
from token_recycling.server.grammar import ANY_OBJECT, Grammars, Schema, call_grammar, json_grammar
from token_recycling.server.job import Answer, AnswerParser
from token_recycling.server.penalties import BiasProcessor, PenaltyProcessor
from token_recycling.server.response_template import TemplateParser, response_template
from token_recycling.server.schemas import (
    LARGEST_COUNT,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
)
from token_recycling.server.special_tokens import Marks, SpecialTokens
from token_recycling.server.tools import CallParser, takes_tools

COMPLETION_TOKENS = 16  # OpenAI's default for completions; chat answers end at the context
NO_CONTEXT_TOKENS = 4096  # longest chat answer of a model without a stated context
MOST_SEED = 2**63


@contextmanager
def _refusing(param: str | None, *others: type[Exception]) -> Iterator[None]:
    """Refuse a request where the library, or one of ``others``, raises."""
    kinds: tuple[type[Exception], ...] = (TokenRecyclingError, *others)
    try:
        yield
    except kinds as error:
        raise ApiError(str(error), param=param) from error


class Prompts:
    """Converts requests. It has a copy of the tokenizer, which threads cannot share."""

    def __init__(self, recycler: TokenRecycling) -> None:
        """Convert requests for the model of ``recycler``."""
        self.tokenizer = copy.deepcopy(recycler.tokenizer)
        config = recycler.model.generation_config
        eos = config.eos_token_id
        self.eos: list[int] = [eos] if isinstance(eos, int) else list(eos or [])
        # As in Transformers, the model's own configuration says whether it samples by default.
        self.temperature = float(config.temperature or 1.0) if config.do_sample else 0.0
        self.repetition_penalty = float(config.repetition_penalty or 1.0)
        self.context = recycler.target.max_context
        self.vocab_size = recycler.target.vocab_size
        self._forces_calls = takes_tools(self.tokenizer)  # else they can only be parsed
        self._template = response_template(self.tokenizer)
        arguments = inspect.signature(self.tokenizer.apply_chat_template).parameters
        # Else a request could bring its own template or conversation.
        self._reserved = {*arguments, "self", "messages"}
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))
        self._grammars = Grammars(self.tokenizer, self.vocab_size, self.eos)
        self._special = SpecialTokens(self.tokenizer)
        self._lock = Lock()

    def of_chat(self, request: ChatRequest) -> list[Answer]:
        """Return the choices of a chat request.

        Raises:
            ApiError: the request cannot be served.
        """
        if request.calls:
            self._check_tools(request)
        try:
            grammar = self._grammar(request)
        except RecursionError as error:
            raise ApiError("a schema is nested too deeply") from error
        with self._lock:
            rendered, marks = self._render(request)
            text = marks.text(rendered)
            self._check_size(marks.count(rendered), "messages")  # each is a token or more
            self._check_text(text, "messages")
            ids = marks.ids(rendered, self.tokenizer)
            self._check_length(ids, "messages")
            if grammar is not None:
                with _refusing(None):
                    _ = self._grammars.tokens
        matcher = None if grammar is None else self._matcher(request, grammar)
        answers = self._choices(request, [ids], LARGEST_COUNT, matcher)
        return [replace(answer, parser=self._parser(request, text)) for answer in answers]

    def _parser(self, request: ChatRequest, prompt: str) -> AnswerParser | None:
        """Return what divides the text of an answer to ``prompt``, or None."""
        form, template = request.response_format, self._template
        in_json = form is not None and form.type != "text"
        if template is None or in_json or (request.calls and not template.takes_tools):
            return CallParser() if request.calls else None
        return TemplateParser(template, prompt, request.tools_json)

    def _check_tools(self, request: ChatRequest) -> None:
        """Refuse tools that the model has no format for, or that cannot be enforced in it."""
        if self._forces_calls:
            return
        if self._template is None or not self._template.takes_tools:
            raise ApiError(
                "tools are not supported: this model's chat template has no tool calls in "
                "the format <tool_call>{…}</tool_call>, and its tokenizer has no response_template",
                param="tools",
            )
        if request.tool_choice not in (None, "auto"):
            problem = "tool_choice must be auto or none", "tool_choice"
        elif request.parallel_tool_calls is False:
            problem = "parallel_tool_calls must be true", "parallel_tool_calls"
        elif any(tool.function.strict for tool in request.tools or []):
            problem = "strict must be false", "tools"
        else:
            return
        raise ApiError(
            f"{problem[0]}: the format of this model's tool calls cannot be enforced",
            param=problem[1],
        )

    def of_completion(self, request: CompletionRequest) -> list[Answer]:
        """Return the choices of a completion request, those of each prompt together.

        Raises:
            ApiError: the request cannot be served.
        """
        with self._lock:
            prompts: list[list[int]] = []
            for prompt in request.prompt:
                ids: Any = prompt
                if isinstance(prompt, str):
                    self._check_text(prompt, "prompt")
                    ids = self.tokenizer(prompt).input_ids
                self._check_length(ids, "prompt")
                prompts.append(ids)
        return self._choices(request, prompts, COMPLETION_TOKENS, None)

    def _render(self, request: ChatRequest) -> tuple[str, Marks]:
        """Return the conversation as the template writes it, with marks (see ``Marks``)."""
        extra = dict(request.chat_template_kwargs or {})
        if taken := sorted(self._reserved & extra.keys()):
            raise ApiError(
                f"chat_template_kwargs cannot set {', '.join(taken)}", param="chat_template_kwargs"
            )
        if request.calls:
            extra["tools"] = request.tools_json
        effort = request.reasoning_effort
        if effort is not None and "reasoning_effort" in str(self.tokenizer.chat_template):
            extra["reasoning_effort"] = effort
        messages = [message.for_template() for message in request.messages]
        (messages, extra), marks = self._special.marked([messages, extra])
        with _refusing("messages", TypeError):
            return render(self.tokenizer, messages, extra), marks

    def _check_text(self, text: str, param: str) -> None:
        # Megabytes of text would take seconds to tokenise.
        if self.context is not None and len(text) > self.context * self._longest_token:
            raise ApiError(
                f"the prompt has {len(text)} characters; the model's context is {self.context} "
                "tokens",
                param=param,
                code="context_length_exceeded",
            )
        with _refusing(param):
            valid_text(text)

    def _check_length(self, ids: list[int], param: str) -> None:
        if not ids:
            raise ApiError("the prompt is empty", param=param)
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ApiError(f"token ids must be from 0 to {self.vocab_size - 1}", param=param)
        self._check_size(len(ids), param)

    def _check_size(self, tokens: int, param: str) -> None:
        if self.context is not None and tokens >= self.context:
            raise ApiError(
                f"the prompt has {tokens} tokens; the model's context is {self.context}, "
                "of which at least one must be left",
                param=param,
                code="context_length_exceeded",
            )

    def _grammar(self, request: ChatRequest) -> str | None:
        """Return the grammar that the answer must follow, or None."""
        form = request.response_format
        if form is not None and form.type == "json_object":
            return json_grammar(ANY_OBJECT)
        if form is not None and form.json_schema is not None:
            schema = form.json_schema.schema_ or ANY_OBJECT
            self._check_schema(schema, "response_format")
            return json_grammar(schema)
        if not (request.calls and self._forces_calls):
            return None
        functions = [tool.function for tool in request.tools or []]
        if (named := request.named) is not None:
            functions = [function for function in functions if function.name == named]
        for function in functions:
            self._check_schema(function.parameters or ANY_OBJECT, "tools")
        return call_grammar(
            [function.model_dump(exclude_none=True) for function in functions],
            forced=named is not None or request.tool_choice == "required",
            several=named is None and request.parallel_tool_calls is not False,
        )

    def _check_schema(self, schema: Schema, param: str) -> None:
        """Refuse special tokens in a schema: written by the model, one would end the answer."""
        if (token := self._special.first(json.dumps(schema, ensure_ascii=False))) is not None:
            raise ApiError(
                f"the schema contains {json.dumps(token)}, a special token of this model",
                param=param,
            )

    def _choices(
        self,
        request: SamplingFields,
        prompts: list[list[int]],
        default: int,
        matcher: LLMatcher | None,
    ) -> list[Answer]:
        given = request.model_dump(
            include={"top_p", "top_k", "min_p", "repetition_penalty"}, exclude_none=True
        )
        if "top_k" in given:
            given["top_k"] = max(given["top_k"], 0)
        first: list[LogitsProcessor] = []
        if request.logit_bias:
            bias = {int(token): float(value) for token, value in request.logit_bias.items()}
            if max(bias) >= self.vocab_size:
                raise ApiError(
                    f"token ids must be from 0 to {self.vocab_size - 1}", param="logit_bias"
                )
            first.append(BiasProcessor(bias))
            # Biases come first, as in vLLM, so the penalty that generate would apply before them
            # follows here.
            penalty = given.get("repetition_penalty", self.repetition_penalty)
            given["repetition_penalty"] = 1.0
            if penalty != 1.0:
                first.append(RepetitionPenaltyLogitsProcessor(penalty))
        seed = secrets.randbelow(MOST_SEED) if request.seed is None else request.seed
        temperature = self.temperature if request.temperature is None else request.temperature
        presence, frequency = request.presence_penalty or 0.0, request.frequency_penalty or 0.0
        answers = []
        for ids in prompts:
            available = NO_CONTEXT_TOKENS if self.context is None else self.context - len(ids)
            if request.limit and request.limit > available:
                raise ApiError(
                    f"the prompt has {len(ids)} tokens and at most {request.limit} more are asked "
                    f"for; the model's context is {self.context}",
                    param="max_tokens",
                    code="context_length_exceeded",
                )
            for index in range(request.n or 1):
                options = CallOptions(
                    max_new_tokens=min(request.limit or default, available),
                    temperature=temperature,
                    seed=(seed + index) % MOST_SEED,
                    stop=request.stops,
                )
                follows, own = None, list(first)
                if presence or frequency:
                    own.append(PenaltyProcessor(len(ids), presence, frequency))
                if matcher is not None:
                    follows = self._grammars.processor(matcher, len(ids))
                    own.append(follows)
                processors = {**given, "logits_processor": own} if own else given
                answers.append(Answer(ids, options, processors, follows))
        return answers

    def _matcher(self, request: ChatRequest, grammar: str) -> LLMatcher:
        if not request.calls:
            with _refusing("response_format"):
                return self._grammars.matcher(grammar)
        try:
            return self._grammars.matcher(grammar)
        except TokenRecyclingError as error:
            for tool in request.tools or []:  # which one is it?
                try:
                    self._grammars.matcher(json_grammar(tool.function.parameters or ANY_OBJECT))
                except TokenRecyclingError as its_error:
                    message = f"the function {json.dumps(tool.function.name)}: {its_error}"
                    raise ApiError(message, param="tools") from error
            raise ApiError(str(error), param="tools") from error

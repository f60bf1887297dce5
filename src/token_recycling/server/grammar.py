"""Answers that follow a grammar, by llguidance."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import llguidance.hf
import llguidance.torch
import torch
from llguidance import LLMatcher
from torch import Tensor
from transformers import LogitsProcessor

from skinny_kernels.errors import one_line
from token_recycling.errors import TokenRecyclingError
from token_recycling.server.tools import BEGIN, END

Schema = dict[str, Any]

ANY_OBJECT: Schema = {"type": "object"}
# Between the parts of a JSON value. Any white space would let a model write it without end.
WHITE_SPACE = r"[ \n]{0,8}"
# Keywords with which an object's properties are not all in one place, or are not limited.
OPEN = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
    *("dependentSchemas", "anyOf", "oneOf", "not", "if", "$ref"),
}


def json_grammar(schema: Schema) -> str:
    """Return the grammar of JSON text that satisfies ``schema``."""
    grammar: str = LLMatcher.grammar_from_json_schema(json.dumps(limited(schema)))
    return grammar


def limited(schema: Schema) -> Schema:
    """Return ``schema`` with a limit of white space, for objects without unnamed properties.

    What satisfies the result satisfies ``schema``. Where a schema says nothing, an object may have
    any further properties, and a small model adds them without end; most clients do not say
    ``additionalProperties: false``. A schema with ``allOf`` is left open, as its parts may
    describe the same object.

    Raises:
        RecursionError: it is nested too deeply.
    """
    base = schema if '"allOf"' in json.dumps(schema) else _closed(schema)
    return {**base, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if isinstance(closed.get(name), dict):
            closed[name] = {key: _closed(value) for key, value in closed[name].items()}
    if isinstance(closed.get("items"), dict):
        closed["items"] = _closed(closed["items"])
    properties = closed.get("properties")
    for name in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(closed.get(name), list) and properties is None:
            closed[name] = [_closed(part) for part in closed[name]]
    required = closed.get("required", [])
    if (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and not OPEN & closed.keys()
    ):
        closed["additionalProperties"] = False
    return closed


def call_grammar(functions: list[dict[str, Any]], *, forced: bool, several: bool) -> str:
    """Return the grammar of an answer that may call ``functions``.

    Args:
        functions: OpenAI's ``function`` objects, with ``name`` and perhaps ``parameters``.
        forced: the answer must be a call; else it may be text, with calls.
        several: more than one call is allowed.
    """
    names = [f"call_{index}" for index in range(len(functions))]
    calls = " | ".join(names)
    if forced:
        more = f"(NEXT ({calls}))*" if several else ""
        lines = [f"start: FIRST ({calls}) {more}", f"FIRST: {json.dumps(BEGIN)}"]
        lines += [f"NEXT: {json.dumps(chr(10) + BEGIN)}"] if several else []
    else:
        start = f"(to_call ({calls}))* TEXT" if several else f"to_call ({calls}) | TEXT"
        lines = [f"start: {start}", f"to_call[lazy]: TEXT {json.dumps(BEGIN)}", r"TEXT: /(.|\n)*/"]
    for name, function in zip(names, functions):
        begin = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
        schema = limited(function.get("parameters") or ANY_OBJECT)
        end = f"}}\n{END}"
        lines.append(f"{name}: {json.dumps(begin)} %json {json.dumps(schema)} {json.dumps(end)}")
    return "\n".join(["%llguidance {}", *lines])


class Grammars:
    """Checks grammars and makes logits processors of them, for one tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: list[int]) -> None:
        """Use ``tokenizer``, for logits of ``vocab_size`` tokens; ``eos`` ends an answer."""
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, eos
        ids = {*tokenizer.all_special_ids, *eos}
        self._special = torch.tensor(
            sorted(token for token in ids if token < vocab_size), dtype=torch.long, device="cpu"
        )

    @cached_property
    def tokens(self) -> Any:
        """The tokenizer as llguidance uses it; made at first use, while nothing else uses it.

        Raises:
            TokenRecyclingError: it cannot be used.
        """
        try:
            return llguidance.hf.from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos or None
            )
        except Exception as error:  # ValueError for slow tokenizers; anything from the Rust part
            raise TokenRecyclingError(
                f"grammars cannot be used with this tokenizer: {one_line(error, 200)}"
            ) from error

    def matcher(self, grammar: str) -> LLMatcher:
        """Return the first state of ``grammar``. Large grammars take seconds.

        Raises:
            TokenRecyclingError: the grammar is not valid or too large.
        """
        matcher = LLMatcher(self.tokens, grammar, log_level=0)
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()  # a grammar that no text satisfies fails only here
            if not first.is_error():
                return matcher
            matcher = first
        raise TokenRecyclingError(f"invalid schema: {_problem(matcher)}")

    def processor(self, matcher: LLMatcher, prompt_length: int) -> GrammarProcessor:
        """Return the processor of an answer that follows ``prompt_length`` tokens."""
        return GrammarProcessor(matcher.deep_copy(), self._vocab_size, prompt_length, self._special)


def _problem(matcher: LLMatcher) -> str:
    """Return the error of a matcher as one line, without the state of the library."""
    error = matcher.get_error().partition("<state>")[0]
    return "no text satisfies it" if "NoExtensionBias" in error else one_line(error, 300)


class GrammarProcessor(LogitsProcessor):  # type: ignore[misc]
    """Rules out the tokens with which an answer would not follow its grammar.

    Attributes:
        problem: why llguidance has given up, for example because a state is too large; None if it
            has not. Nothing is ruled out any longer then, so the answer should be ended. It is not
            an exception because that would end the answers that are decoded together with this.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, prompt_length: int, special: Tensor
    ) -> None:
        """Follow ``matcher``, which is in its first state, after ``prompt_length`` tokens.

        ``special`` (int64) are the special tokens, which are no text and may only end an answer.
        """
        self._matcher, self._read = matcher, prompt_length
        self._special = special
        self._mask = llguidance.torch.allocate_token_bitmask(1, vocab_size)
        self.problem: str | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return ``scores`` [1, V] with -inf for tokens that the grammar rules out."""
        if self.problem is not None:
            return scores
        new = input_ids[0, self._read :].tolist()
        self._read += len(new)
        if new:
            self._matcher.consume_tokens(new)
        llguidance.torch.fill_next_token_bitmask(self._matcher, self._mask)
        if self._matcher.is_error():
            self.problem = f"the grammar of the answer: {_problem(self._matcher)}"
            return scores
        bits = torch.arange(32, dtype=torch.int32, device="cpu")
        allowed = ((self._mask[0, :, None] >> bits) & 1).bool().flatten()[: scores.shape[-1]]
        if not self._matcher.is_accepting():
            allowed[self._special] = False
            if not allowed.any():  # the grammar's text is that of a special token
                self.problem = "the grammar of the answer: it requires the text of a special token"
                return scores
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

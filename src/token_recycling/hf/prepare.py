"""The logits processors and stopping criteria that a model's ``generate`` would use."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch

from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.hf.criteria import looks_at_batch
from token_recycling.hf.request import (
    KNOWN_INPUTS,
    Request,
    RequestCollector,
    asks_for_row,
    row_by_row,
)
from token_recycling.hf.serve import patch_generate
from token_recycling.model.cache_name import NEW, OLD
from token_recycling.model.limits import input_device

# Transformers warns if these are passed with greedy decoding.
SAMPLING_ONLY = ("top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")

INFINITY = float("inf")
RANGES = {
    "max_new_tokens": (1, INFINITY),
    "temperature": (0.0, INFINITY),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (0, INFINITY),
    "repetition_penalty": (1e-6, INFINITY),
}
WHOLE = ("max_new_tokens", "top_k")
KINDS: tuple[Any, Any] = (Real, Integral)

# Options of ``generate`` that would change the answer and are refused, and what to do instead.
REFUSED = {
    "do_sample": "set temperature",
    "max_length": "set max_new_tokens",
    "inputs_embeds": "pass the prompt as token ids",
    "attention_mask": "prompts need no padding",
    "position_ids": "prompts need no padding",
    OLD: "set keep_context",
    NEW: "set keep_context",
    "use_cache": "the cache is always used",
    "return_dict_in_generate": "call model.generate with custom_generate",
    "output_scores": "call model.generate with custom_generate",
    "output_logits": "call model.generate with custom_generate",
    "output_attentions": "call model.generate with custom_generate",
    "output_hidden_states": "call model.generate with custom_generate",
    "stopping_criteria": "use stream() and break out of the loop",
    "stop_strings": "set stop",
    "streamer": "use stream()",
    "num_return_sequences": "pass the prompt several times",
    "prompt_lookup_num_tokens": "set drafter to prompt-lookup",
    "assistant_model": "Token Recycling needs no draft model",
    "custom_generate": "Token Recycling sets it itself",
}


def generate_options(
    *, max_new_tokens: int, temperature: float = 0.0, **processors: Any
) -> dict[str, Any]:
    """Return the options for ``model.generate``: greedy at temperature 0, else sampling.

    Raises:
        TokenRecyclingError: a number is of the wrong type or out of range, which Transformers
            does not always check.
    """
    numbers = {name: value for name, value in processors.items() if value is not None}
    numbers |= {"max_new_tokens": max_new_tokens, "temperature": temperature}
    for name, (low, high) in RANGES.items():
        if name not in numbers:
            continue
        value: Any = numbers[name]
        whole = name in WHOLE
        if isinstance(value, bool) or not isinstance(value, KINDS[whole]):
            kind = "a whole number" if whole else "a number"
            raise TokenRecyclingError(f"{name} is {value!r}; it must be {kind}")
        # Transformers does not accept numpy numbers
        numbers[name] = int(value) if whole else float(value)
        if not low <= numbers[name] <= high:
            allowed = f"{low:g} or more" if high == INFINITY else f"from {low:g} to {high:g}"
            raise TokenRecyclingError(f"{name} is {value}; it must be {allowed}")
    given, temperature = numbers, numbers.pop("temperature")
    given.setdefault("pad_token_id", 0)  # unused for a single row, but generate warns without it
    if 0 < temperature < 1e-5:
        raise TokenRecyclingError(f"temperature is {temperature}; it must be 0, or 1e-5 or more")
    if temperature:
        given.update(do_sample=True, temperature=temperature)
    else:
        given = {name: value for name, value in given.items() if name not in SAMPLING_ONLY}
        given.update(do_sample=False)
    return given


def prepare(model: Any, tokenizer: Any, prompt: list[int], options: dict[str, Any]) -> Request:
    """Return what ``model.generate`` prepares for ``prompt``, without decoding anything.

    Options that are not given come from the model's ``generation_config``, as in ``generate``.

    Raises:
        TokenRecyclingError: Transformers refuses an option, or the call cannot be recycled; the
            message gives the reason.
    """
    collector = RequestCollector()
    patch_generate(model)  # a copied model may not be patched yet
    ids = torch.tensor([prompt], device=input_device(model))
    given = {"attention_mask": torch.ones_like(ids), "use_cache": True, **options}
    try:
        model.generate(ids, custom_generate=collector, tokenizer=tokenizer, **given)
    except TokenRecyclingError:
        raise
    except Exception as error:  # options can make Transformers raise anything
        line = one_line(error)
        raise TokenRecyclingError(f"Transformers refuses these options: {line}") from error
    # Targets handle the inputs that the model prepares by default.
    own = KNOWN_INPUTS | options.keys()
    inputs = {name: value for name, value in collector.request.inputs.items() if name in own}
    request = replace(collector.request, inputs=inputs)
    if reason := request.why_unservable(None):  # no limit: answers end at the model's context
        raise TokenRecyclingError(f"Token Recycling does not support this call: {reason}")
    if request.batch > 1:
        more = f"num_return_sequences is {request.batch}"
        raise TokenRecyclingError(f"{more}; {REFUSED['num_return_sequences']}")
    if request.rows() != [prompt]:
        raise TokenRecyclingError("token_healing changes the prompt; switch it off")
    return request


def mixes_prompts(requests: list[Request]) -> str | None:
    """Return why decoding prompts as a batch would change their answers, or None.

    Each prompt was prepared separately, so only objects passed by the caller are common to all.
    """
    first, *others = requests
    if not others:
        return None
    for criterion in first.criteria:
        if looks_at_batch(criterion):
            return f"{type(criterion).__name__} may depend on the whole batch"
    brought = {id(processor) for processor in others[0].processors}
    for processor in first.processors:
        if asks_for_row(processor) or (id(processor) in brought and not row_by_row(processor)):
            return f"{type(processor).__name__} may depend on the whole batch"
    return None

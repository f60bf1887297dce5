"""The logits processors and stopping criteria that a model's ``generate`` would use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor

from skinny_kernels.errors import one_line
from token_recycling.decoding.numbers import SAMPLING_ONLY, checked
from token_recycling.errors import TokenRecyclingError
from token_recycling.hf.criteria import looks_at_batch
from token_recycling.hf.eligibility import KNOWN_INPUTS, row_by_row, why_unservable
from token_recycling.hf.request import DecodingMethod, Request
from token_recycling.hf.serve import patch_generate, unpatch_generate
from token_recycling.model.cache_name import NEW, OLD
from token_recycling.model.limits import input_device

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
    *, max_new_tokens: int, temperature: float = 0.0, **others: Any
) -> dict[str, Any]:
    """Return the options for ``model.generate``: greedy at temperature 0, else sampling.

    Raises:
        TokenRecyclingError: a number is of the wrong type or out of range, which Transformers
            does not always check.
    """
    chosen = {name: value for name, value in others.items() if value is not None}
    custom = chosen.get("logits_processor", [])
    if not (isinstance(custom, list | tuple) and all(map(callable, custom))):
        raise TokenRecyclingError("logits_processor must be a list of logits processors")
    given = checked(chosen | {"max_new_tokens": max_new_tokens, "temperature": temperature})
    temperature = given.pop("temperature")
    given.setdefault("pad_token_id", 0)  # unused for a single row, but generate warns without it
    if temperature:
        given.update(do_sample=True, temperature=temperature)
    else:
        given = {name: value for name, value in given.items() if name not in SAMPLING_ONLY}
        given.update(do_sample=False)
    return given


class _Collector(DecodingMethod):
    """Decodes nothing: it keeps what ``generate`` has prepared."""

    request: Request

    def serve_generate(
        self, model: Any, request: Request, streamer: Any, inputs_tensor: Tensor | None
    ) -> Tensor:
        self.request = request
        return request.input_ids


def request_for(model: Any, tokenizer: Any, prompt: list[int], options: dict[str, Any]) -> Request:
    """Return what ``model.generate`` prepares for ``prompt``, without decoding anything.

    Options that are not given come from the model's ``generation_config``, as in ``generate``.

    Raises:
        TokenRecyclingError: Transformers refuses an option, or the call cannot be recycled; the
            message gives the reason.
    """
    collector = _Collector()
    patch_generate(model, collector)
    ids = torch.tensor([prompt], device=input_device(model))
    given = {"attention_mask": torch.ones_like(ids), "use_cache": True, **options}
    try:
        model.generate(ids, custom_generate=collector, tokenizer=tokenizer, **given)
    except TokenRecyclingError:
        raise
    except Exception as error:  # options can make Transformers raise anything
        line = one_line(error)
        raise TokenRecyclingError(f"Transformers refuses these options: {line}") from error
    finally:
        unpatch_generate(model, collector)
    # Targets handle the inputs that the model prepares by default.
    known = KNOWN_INPUTS | options.keys()
    inputs = {name: value for name, value in collector.request.inputs.items() if name in known}
    request = replace(collector.request, inputs=inputs)
    # No limit: answers end at the model's context.
    if reason := why_unservable(request, None, None):
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
        # This processor passes the row's index in the batch to the caller's function.
        by_index = isinstance(processor, PrefixConstrainedLogitsProcessor)
        if by_index or (id(processor) in brought and not row_by_row(processor)):
            return f"{type(processor).__name__} may depend on the whole batch"
    return None

"""How a model's ``generate`` would choose tokens: its own processors and end-of-sequence ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.masks import input_device


@dataclass(frozen=True)
class Choice:
    """What Transformers prepared for one prompt.

    Attributes:
        processors: its ``LogitsProcessorList``; empty for plain greedy decoding.
        do_sample: sample, or take the argmax.
        eos: the ids that end a sequence.
    """

    processors: Any  # (ids [1, t], logits [1, V]) -> scores [1, V]; its length is their number
    do_sample: bool
    eos: tuple[int, ...]

    @property
    def is_plain_greedy(self) -> bool:
        """True when a token is the argmax of the bare logits."""
        return not self.do_sample and len(self.processors) == 0


# Transformers warns when these are given to a greedy run.
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

# Options of ``generate`` that would change the answer and are not kept here, and what to do.
REFUSED = {
    "do_sample": "set temperature",
    "max_length": "set max_new_tokens",
    "max_time": "leave a stream early",
    "stopping_criteria": "leave a stream early",
    "stop_strings": "set stop",
    "streamer": "use stream()",
    "num_return_sequences": "give the prompt several times",
    "prompt_lookup_num_tokens": "set drafter to prompt-lookup",
    "assistant_model": "there is no draft model",
    "custom_generate": "it is in use",
}


def generate_options(
    *, max_new_tokens: int, temperature: float = 0.0, **processors: Any
) -> dict[str, Any]:
    """Return the options for ``model.generate``: greedy at temperature 0, else sampling.

    Raises:
        TokenRecyclingError: a number is out of range (Transformers ignores some of these).
    """
    given = {name: value for name, value in processors.items() if value is not None}
    numbers = {"max_new_tokens": max_new_tokens, "temperature": temperature, **given}
    for name, (low, high) in RANGES.items():
        value = numbers.get(name, low)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TokenRecyclingError(f"{name} is {value!r}; it must be a number")
        if not low <= value <= high:
            raise TokenRecyclingError(f"{name} is {value}; it must lie between {low} and {high}")
    given.setdefault("pad_token_id", 0)  # a single row is not padded; without it generate warns
    if 0 < temperature < 1e-5:
        raise TokenRecyclingError(f"temperature is {temperature}; use 0, or 1e-5 and more")
    if temperature:
        given.update(do_sample=True, temperature=temperature)
    else:
        given = {name: value for name, value in given.items() if name not in SAMPLING_ONLY}
        given.update(do_sample=False)
    return {"max_new_tokens": max_new_tokens, **given}


def prepare(model: Any, prompt: list[int], options: dict[str, Any]) -> Choice:
    """Let ``model.generate`` prepare itself for ``prompt`` and return what it prepared.

    Options that are not given come from the model's ``generation_config``, as ever. The call
    ends before anything is decoded: ``custom_generate`` gets the finished preparations.

    Raises:
        TokenRecyclingError: Transformers refuses an option.
    """
    prepared: list[Choice] = []

    def take(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **others: Any,
    ) -> Tensor:
        eos = generation_config.eos_token_id
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        if generation_config.num_beams != 1:
            raise TokenRecyclingError("beam search is not supported; set num_beams=1")
        prepared.append(Choice(logits_processor, bool(generation_config.do_sample), tuple(ids)))
        return input_ids

    ids = torch.tensor([prompt], device=input_device(model))
    given = {"attention_mask": torch.ones_like(ids), "use_cache": False, **options}
    try:
        model.generate(ids, custom_generate=take, **given)
    except TokenRecyclingError:
        raise
    except (ValueError, TypeError) as error:
        line = one_line(error)
        raise TokenRecyclingError(f"Transformers refuses these options: {line}") from error
    return prepared[0]

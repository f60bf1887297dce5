"""The rules by which Token Recycling can serve a ``generate`` call of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
import transformers
from transformers.generation import GenerationMode

from token_recycling.hf.cache_interop import extendable
from token_recycling.hf.request import Request
from token_recycling.model.cache_name import NEW, OLD

# Model inputs that any call may have; a call with others goes to stock decoding.
KNOWN_INPUTS = {
    "attention_mask",
    "position_ids",
    OLD,
    NEW,
    "use_cache",
    "logits_to_keep",
    "cache_position",
    "tokenizer",
    "return_dict",
}
_OWN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_SAME_RESULT_CACHES = (None, "dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked")
# Processors that treat each row independently of its index and of the other rows.
_ROW_BY_ROW_PROCESSORS = tuple(
    getattr(transformers, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MinPLogitsWarper",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
    if hasattr(transformers, name)
)


def row_by_row(processor: Any) -> bool:
    """Return whether a processor treats each row independently."""
    return type(processor) in _ROW_BY_ROW_PROCESSORS


def why_unservable(
    request: Request, max_positions: int | None, vocab_size: int | None
) -> str | None:
    """Return why Token Recycling does not support this call, or None.

    If there is a reason, ``enable`` falls back to standard decoding (or raises if strict), and
    ``TokenRecycling.generate`` raises.

    Args:
        request: the call.
        max_positions: the model's position limit, if any.
        vocab_size: of the model; None: the token ids are known to be right.
    """
    reasons = (rule(request) for rule in RULES)
    return (
        next(filter(None, reasons), None)
        or (None if vocab_size is None else _ids(request, vocab_size))
        or _length(request, max_positions)
    )


def _decoding_method(request: Request) -> str | None:
    if request.mode not in _OWN_MODES:
        return f"{request.mode.value.replace('_', ' ')} is requested"
    return "synced_gpus is set" if request.synced_gpus else None


def _outputs(request: Request) -> str | None:
    if request.returns("output_attentions", "output_hidden_states"):
        return "attentions or hidden states are requested"
    if request.batch > 1 and request.returns("output_scores", "output_logits"):
        return "scores or logits of a batch are requested (ended rows have those of padding)"
    return None


def _prompt(request: Request) -> str | None:
    if request.input_ids.shape[1] == 0 or request.inputs.get("inputs_embeds") is not None:
        return "the prompt is given as embeddings"
    return "the batch is empty" if request.batch == 0 else None


def _model_inputs(request: Request) -> str | None:
    for name, value in request.inputs.items():
        nothing = value is None or (isinstance(value, dict) and not any(value.values()))
        if name not in KNOWN_INPUTS and not nothing:
            return f"it passes {name} to the model"
    return None


def _cache(request: Request) -> str | None:
    if not request.inputs.get("use_cache", True):
        return "use_cache is off"
    kind = request.config.cache_implementation
    if kind not in _SAME_RESULT_CACHES:
        return f"cache_implementation is {kind}"
    if request.own_cache and not extendable(request.cache):
        return f"its {type(request.cache).__name__} cannot be continued"
    if not request.cached:
        return None
    if request.batch > 1:
        return "a batch continues from a cache"
    if not request.continues and request.cached >= request.input_ids.shape[1]:
        return "the cache already holds the whole prompt"
    return None


def _padding(request: Request) -> str | None:
    mask = request.inputs.get("attention_mask")
    if mask is None:
        return None
    if not request.cached and mask.shape != request.input_ids.shape:
        return "the attention mask and the prompt have different shapes"
    bits = mask.bool()
    if not bool((mask == bits).all()):
        return "the attention mask has values other than 0 and 1"
    if not bool(bits[:, -1].all()) or bool((bits[:, :-1] & ~bits[:, 1:]).any()):
        return "the padding is not on the left"
    if request.cached and not bool(bits.all()):
        return "the cached prompt is padded"
    return None


def _position_ids(request: Request) -> str | None:
    """Check that the positions are those that the mask implies, which ``_padding`` has checked."""
    positions, mask = request.inputs.get("position_ids"), request.inputs.get("attention_mask")
    if positions is None:
        return None
    if positions.ndim != 2:
        return "position_ids is not two-dimensional"
    length = request.input_ids.shape[1]
    if mask is None:
        mask = torch.ones_like(request.input_ids)
    start = mask.shape[1] - mask.long().sum(dim=1, keepdim=True)
    end = request.cached + length if request.continues else length
    expected = (torch.arange(end, device=start.device) - start)[:, -length:]
    given = positions[..., -length:].to(start.device).expand(request.batch, length)
    if bool((given == expected)[mask[:, -length:].bool()].all()):
        return None
    return "position_ids differs from what the attention mask implies"


def _whole_batch(request: Request) -> str | None:
    if request.batch == 1:
        return None
    for processor in request.processors:
        if not row_by_row(processor):
            return f"{type(processor).__name__} may depend on the whole batch"
    if not request.ends_rows and any(hasattr(c, "stop_strings") for c in request.criteria):
        return "without an end-of-sequence id, rows of a batch continue after a stop string"
    return None


# Each returns why a call cannot be served, or None; a rule may rely on those before it.
RULES: tuple[Callable[[Request], str | None], ...] = (
    _decoding_method,
    _outputs,
    _prompt,
    _model_inputs,
    _cache,
    _padding,
    _position_ids,
    _whole_batch,
)


def _ids(request: Request, vocab_size: int) -> str | None:
    """Check what the embedding looks up, padding included."""
    ids = request.input_ids
    if ids.dtype not in (torch.int64, torch.int32):
        return f"the token ids are {str(ids.dtype).removeprefix('torch.')}"
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        return f"a token id is not between 0 and {vocab_size - 1}"
    return None


def _length(request: Request, max_positions: int | None) -> str | None:
    if max_positions is None:
        return None
    limits = (getattr(criterion, "max_length", inf) for criterion in request.criteria)
    cached = request.cached if request.continues else 0
    if min(limits, default=inf) - 1 + cached > max_positions:
        return f"the answer may exceed the model's {max_positions} positions"
    return None

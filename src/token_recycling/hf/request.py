"""A prepared ``generate`` call, and the reasons why it may not be recyclable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation import GenerationMode, LogitsProcessorList

from token_recycling.hf.cache_interop import extendable
from token_recycling.model.cache_name import NEW, OLD, cache_in

OWN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
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
SAME_RESULT_CACHES = (None, "dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked")
# Processors that treat each row independently of its index and of the other rows.
ROW_BY_ROW_PROCESSORS = tuple(
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
    return type(processor) in ROW_BY_ROW_PROCESSORS


def asks_for_row(processor: Any) -> bool:
    """Return whether a processor passes the row's index in the batch to user code."""
    return isinstance(processor, transformers.PrefixConstrainedLogitsProcessor)


@dataclass(frozen=True)
class Request:
    """A ``generate`` call as Transformers prepared it (see ``GenerationMixin._sample``)."""

    input_ids: Tensor  # int64 [B, L], padded on the left
    processors: Any
    criteria: Any
    config: Any
    inputs: dict[str, Any]  # for the model's forward
    synced_gpus: bool
    own_cache: bool  # the user passed a cache to fill

    @classmethod
    def of_call(
        cls,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        own_cache: bool = False,
        **inputs: Any,
    ) -> Request:
        """Create a request from the arguments that ``generate`` passes to a decoding method."""
        return cls(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            inputs,
            synced_gpus,
            own_cache,
        )

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.input_ids.shape[0]

    @property
    def cache(self) -> Any:
        """The user's cache, or the one that Transformers created for this call."""
        return cache_in(self.inputs)

    @property
    def cached(self) -> int:
        """Number of tokens in the user's cache."""
        return int(self.cache.get_seq_length()) if self.own_cache else 0

    @property
    def mode(self) -> GenerationMode:
        """The decoding method that the options select."""
        return self.config.get_generation_mode(self.inputs.get("assistant_model"))

    @property
    def continues(self) -> bool:
        """Whether ``input_ids`` contain only the tokens after the cached ones."""
        mask = self.inputs.get("attention_mask")
        known = getattr(self.config, "_mask_length", None) if mask is None else mask.shape[1]
        return known is not None and known > self.input_ids.shape[1]

    def returns(self, *outputs: str) -> bool:
        """Return whether the result must include one of ``outputs``."""
        returns = self.config.return_dict_in_generate
        return bool(returns) and any(getattr(self.config, name, False) for name in outputs)

    def rows(self) -> list[list[int]]:
        """Return the ids of each row, including padding."""
        rows: list[list[int]] = self.input_ids.tolist()
        return rows

    def prompts(self) -> list[list[int]]:
        """Return the tokens of each row without padding; 0 for cached tokens that are not known."""
        mask = self.inputs.get("attention_mask")
        rows = self.rows()
        if self.continues:
            return [[0] * self.cached + row for row in rows]
        if mask is None:
            return rows
        return [row[len(row) - n :] for row, n in zip(rows, mask.long().sum(dim=1).tolist())]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether every token is the argmax of the raw logits."""
        return not self.config.do_sample and len(self.processors) == 0

    def row_processors(self, row: int) -> Any:
        """Return the processors for a single row of the batch."""
        processors = LogitsProcessorList()
        for processor in self.processors:
            ignored = getattr(processor, "prompt_ignore_length", None)
            if self.batch > 1 and isinstance(ignored, Tensor):  # one value per row
                processor = copy(processor)
                processor.prompt_ignore_length = ignored[row : row + 1]
            processors.append(processor)
        return processors

    def why_unservable(self, max_positions: int | None) -> str | None:
        """Return why Token Recycling does not support this call, or None.

        If there is a reason, ``enable`` falls back to standard decoding (or raises if strict), and
        ``TokenRecycling.generate`` raises.

        Args:
            max_positions: the model's position limit, if any.
        """
        return (
            self._other_method()
            or self._other_inputs()
            or self._other_cache()
            or self._padding()
            or self._beyond(max_positions)
            or self._whole_batch()
        )

    def _other_method(self) -> str | None:
        if self.mode not in OWN_MODES:
            return f"{self.mode.value.replace('_', ' ')} is requested"
        if self.synced_gpus:
            return "synced_gpus is set"
        if self.returns("output_attentions", "output_hidden_states"):
            return "attentions or hidden states are requested"
        return None

    def _other_inputs(self) -> str | None:
        if self.input_ids.shape[1] == 0 or self.inputs.get("inputs_embeds") is not None:
            return "the prompt is given as embeddings"
        if self.input_ids.shape[0] == 0:
            return "the batch is empty"
        for name, value in self.inputs.items():
            nothing = value is None or (isinstance(value, dict) and not any(value.values()))
            if name not in KNOWN_INPUTS and not nothing:
                return f"it passes {name} to the model"
        return None

    def _other_cache(self) -> str | None:
        if not self.inputs.get("use_cache", True):
            return "use_cache is off"
        kind = self.config.cache_implementation
        if kind not in SAME_RESULT_CACHES:
            return f"cache_implementation is {kind}"
        if self.own_cache and not extendable(self.cache):
            return f"its {type(self.cache).__name__} cannot be continued"
        if not self.cached:
            return None
        if self.batch > 1:
            return "a batch continues from a cache"
        if not self.continues and self.cached >= self.input_ids.shape[1]:
            return "the cache already holds the whole prompt"
        return None

    def _padding(self) -> str | None:
        mask, length = self.inputs.get("attention_mask"), self.input_ids.shape[1]
        if mask is None:
            start = torch.zeros(self.batch, 1, dtype=torch.long, device=self.input_ids.device)
            mask = torch.ones_like(self.input_ids)
        else:
            if not self.cached and mask.shape != self.input_ids.shape:
                return "the attention mask and the prompt have different shapes"
            bits = mask.bool()
            if not bool(bits[:, -1].all()) or bool((bits[:, :-1] & ~bits[:, 1:]).any()):
                return "the padding is not on the left"
            if self.cached and not bool(bits.all()):
                return "the cached prompt is padded"
            start = mask.shape[1] - mask.long().sum(dim=1, keepdim=True)
        positions = self.inputs.get("position_ids")
        if positions is None:
            return None
        if positions.ndim != 2:
            return "position_ids is not two-dimensional"
        end = self.cached + length if self.continues else length
        expected = (torch.arange(end, device=start.device) - start)[:, -length:]
        given = positions[..., -length:].to(start.device).expand(self.batch, length)
        seen = mask[:, -length:].bool().to(start.device)
        if bool((given == expected)[seen].all()):
            return None
        return "position_ids differs from what the attention mask implies"

    def _beyond(self, max_positions: int | None) -> str | None:
        if max_positions is None:
            return None
        limits = (getattr(criterion, "max_length", inf) for criterion in self.criteria)
        longest = min(limits, default=inf) - 1 + (self.cached if self.continues else 0)
        if longest > max_positions:
            return f"the answer may exceed the model's {max_positions} positions"
        return None

    @property
    def ends_rows(self) -> bool:
        """Whether a row is padded after its end; otherwise it continues until all rows end."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)

    def _whole_batch(self) -> str | None:
        if self.batch == 1:
            return None
        for processor in self.processors:
            if not row_by_row(processor):
                return f"{type(processor).__name__} may depend on the whole batch"
        if not self.ends_rows and any(hasattr(c, "stop_strings") for c in self.criteria):
            return "without an end-of-sequence id, rows of a batch continue after a stop string"
        if self.returns("output_scores", "output_logits"):
            return "scores or logits of a batch are requested (ended rows have those of padding)"
        return None


class DecodingMethod(ABC):
    """A decoding method for ``generate(custom_generate=...)``; ``patch_generate`` recognizes it."""

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        **prepared: Any,
    ) -> Any:
        """Take a call that ``generate`` has prepared; called by ``generate``.

        Returns:
            What ``generate`` returns.
        """
        return self.decode(model, Request.of_call(input_ids, **prepared), streamer, inputs_tensor)

    @abstractmethod
    def decode(
        self, model: Any, request: Request, streamer: Any, inputs_tensor: Tensor | None
    ) -> Any:
        """Decode ``request``; return what ``generate`` is to return."""


class RequestCollector(DecodingMethod):
    """Decodes nothing: it stores what ``generate`` has prepared in ``request``."""

    request: Request

    def decode(
        self, model: Any, request: Request, streamer: Any, inputs_tensor: Tensor | None
    ) -> Tensor:
        """Store the request and return the prompt."""
        self.request = request
        return request.input_ids

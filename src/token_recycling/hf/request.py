"""A ``generate`` call as Transformers prepared it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMode, LogitsProcessorList

from token_recycling.model.cache_name import cache_in


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

    @property
    def ends_rows(self) -> bool:
        """Whether a row is padded after its end; otherwise it continues until all rows end."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)


class DecodingMethod(ABC):
    """A decoding method for ``generate(custom_generate=...)``; ``patch_generate`` recognizes it."""

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        own_cache: bool = False,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        **model_inputs: Any,
    ) -> Any:
        """Take a call that ``generate`` has prepared; called by ``generate``.

        Returns:
            What ``generate`` returns.
        """
        request = Request(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            model_inputs,
            synced_gpus,
            own_cache,
        )
        return self.serve_generate(model, request, streamer, inputs_tensor)

    @abstractmethod
    def serve_generate(
        self, model: Any, request: Request, streamer: Any, inputs_tensor: Tensor | None
    ) -> Any:
        """Decode ``request``; return what ``generate`` is to return."""

"""The target of last resort: a model that tree attention cannot verify, decoded plainly."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from token_recycling.masks import text_config
from token_recycling.target import OnProgress, OnPrompt, check_prompts, context_limit
from token_recycling.tree import DraftTree


class PlainTarget:
    """Any ``…ForCausalLM``, with its own cache and masks, one token per step.

    Prompts of different length are padded on the left, as ``generate`` wants them.
    """

    def __init__(self, model: Any, exact: AbstractContextManager[Any] | None = None) -> None:
        """Wrap ``model``; its logits are computed inside ``exact``."""
        self.model, self.exact = model, exact or nullcontext()
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.vocab_size = int(text_config(model.config).vocab_size)
        self.max_context = context_limit(model.config)
        self._takes = inspect.signature(model.forward).parameters.keys()
        self._cache_name = "cache_params" if "cache_params" in self._takes else "past_key_values"
        self.reset()

    def reset(self) -> None:
        """Forget the context and free its memory."""
        self._cache: Any = None
        self._mask = torch.ones((1, 0), dtype=torch.long, device=self.device)

    @torch.inference_mode()
    def prefill(
        self,
        prompts: list[list[int]],
        *,
        on_prompt: OnPrompt | None = None,
        on_progress: OnProgress | None = None,
        keep: int = 0,
    ) -> Tensor:
        """Read the prompts anew, in one forward, whatever ``keep`` says."""
        check_prompts(prompts, self.max_context)
        self.reset()
        longest = max(map(len, prompts))
        ids = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        self._mask = mask[:, :0].to(self.device)
        logits = self._forward(ids.to(self.device), mask.to(self.device))
        if on_progress is not None:
            on_progress(longest, longest)
        return logits[:, -1]

    def verify(self, draft: DraftTree) -> Tensor:
        """Return the logits [B, 1, V] of the roots; there is nothing else in ``draft``."""
        assert draft.tokens.shape[1] == 1
        return self._forward(draft.tokens, torch.ones_like(draft.tokens))

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Do nothing: the roots are in the cache already."""

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, mask], dim=1)
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": self._mask}
        if "position_ids" in self._takes:
            positions = (self._mask.cumsum(dim=1) - 1).clamp(min=0)
            inputs["position_ids"] = positions[:, -tokens.shape[1] :]
        if self._cache is not None and self._cache_name == "cache_params":
            del inputs["attention_mask"]  # Mamba's kind would apply it to the new token
        inputs[self._cache_name] = self._cache
        with self.exact:
            output = self.model(**inputs, use_cache=True)
        self._cache = output.get(self._cache_name)
        logits: Tensor = output.logits.to(self.device)
        return logits

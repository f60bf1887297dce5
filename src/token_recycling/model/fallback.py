"""The fallback target: plain decoding of a model that tree attention cannot verify."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin

from token_recycling.drafting.draft import DraftTree
from token_recycling.model.base import LearnPrompt, OnProgress, PromptMask
from token_recycling.model.cache_name import cache_name
from token_recycling.model.limits import (
    check_prompts,
    context_limit,
    input_device,
    text_config,
    vocabulary,
)
from token_recycling.model.lm_head import Float32Head, StockHead
from token_recycling.model.target import inference_context_of

# Transformers >= 5.4 slices the inputs by length, older versions by ``cache_position``.
SLICES_BY_LENGTH = (
    "next_sequence_length"
    in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


class PlainTarget:
    """Any ``…ForCausalLM``, one token per step, with the inputs it prepares for ``generate``.

    Prompts of different lengths are padded on the left, as ``generate`` expects.
    """

    batch_invariant = False  # for rows of a batch, which are padded
    is_warm, adoptions = True, 0

    def __init__(self, model: Any, lm_head: Float32Head | StockHead | None = None) -> None:
        """Wrap ``model``, whose logits are computed inside the context ``lm_head``."""
        self.model, self.lm_head = model, lm_head or StockHead()
        self.inference_context = inference_context_of(model)
        self.device: torch.device = input_device(model)
        self.vocab_size = vocabulary(model)
        self.max_context = context_limit(model.config)
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self.reset()

    def reset(self) -> None:
        """Drop the context and free its memory."""
        self._ids = torch.zeros((1, 0), dtype=torch.long, device=self.device)
        self._state: dict[str, Any] = {}  # generate's model_kwargs

    def deepest(self) -> list[int] | None:
        """Return None: there are no drafts."""
        return None

    def prefill(
        self,
        prompts: list[list[int]],
        *,
        prompt_mask: PromptMask | None = None,
        learn_prompt: LearnPrompt | None = None,
        whole_prompts: bool = False,
        on_progress: OnProgress | None = None,
        cached: int = 0,
    ) -> Tensor:
        """Read the prompts in one forward; ``cached`` is ignored and nothing is learnt."""
        self.lm_head.refresh()
        check_prompts(prompts, self.max_context)
        longest = max(map(len, prompts))
        pad = getattr(self.model.generation_config, "pad_token_id", None) or 0
        rows = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
        ids = torch.tensor(rows, device="cpu")
        mask = torch.ones_like(ids)
        for row, prompt in enumerate(prompts):
            mask[row, : longest - len(prompt)] = 0
        self._ids = ids.to(self.device)
        self._state = self._first_state(mask.to(self.device))
        logits = self._forward(first=True)
        if on_progress is not None:
            on_progress(longest, longest)
        return logits

    def verify(self, draft: DraftTree) -> Tensor:
        """Return the logits [B, 1, V] of the roots; ``draft`` must be root-only."""
        assert draft.tokens.shape[1] == 1
        self._ids = torch.cat([self._ids, draft.tokens], dim=1)
        return self._forward(first=False)[:, None]

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Do nothing: the roots are already in the cache."""

    def clear_drafts(self) -> None:
        """Do nothing: there are no drafts."""

    def _first_state(self, mask: Tensor) -> dict[str, Any]:
        """Return the ``model_kwargs`` that ``generate`` starts with."""
        state: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
        if "logits_to_keep" in self._takes:
            state["logits_to_keep"] = 1
        name = cache_name(self._takes)
        if name in self._takes and self.model._supports_default_dynamic_cache():
            state[name] = DynamicCache(config=text_config(self.model.config))
        if not SLICES_BY_LENGTH:
            length = self._ids.shape[1]
            return dict(self.model._get_initial_cache_position(length, self.device, state))
        if "position_ids" in self._takes:
            positions = self.model._prepare_position_ids_for_generation(self._ids, dict(state))
            if positions is not None:
                state["position_ids"] = positions
        return state

    def _forward(self, first: bool) -> Tensor:
        """Read the new ids; return the logits [B, V] after the last one."""
        options: dict[str, Any] = {}
        if SLICES_BY_LENGTH:
            options = {
                "next_sequence_length": None if first else 1,
                "is_first_iteration": first,
            }
        with self.inference_context(), self.lm_head:
            inputs = self.model.prepare_inputs_for_generation(self._ids, **options, **self._state)
            output = self.model(**inputs, return_dict=True)
            self._state = self.model._update_model_kwargs_for_generation(output, self._state)
        logits: Tensor = output.logits[:, -1].to(self.device)
        return logits

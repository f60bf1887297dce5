"""The target: an unmodified Transformers model that verifies draft trees."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers import GenerationMixin

from skinny_kernels import layers as cpu_layers
from skinny_kernels import sdpa
from skinny_kernels.attention import deepest
from skinny_kernels.gpu import layers as gpu_layers
from skinny_kernels.gpu.choice import has_device_kernels
from skinny_kernels.linear import DTYPES
from skinny_kernels.packed import PackedLinear
from skinny_kernels.recordings import Recordings
from skinny_kernels.replay import StepInputs
from skinny_kernels.shadow import shadow_of
from skinny_kernels.windows import AttentionWindow, additive_masks
from token_recycling import defaults
from token_recycling.drafting.draft import DraftTree, root_only
from token_recycling.errors import TokenRecyclingError
from token_recycling.model.base import PROMPT_COST, LearnPrompt, OnProgress, PromptMask
from token_recycling.model.cache_name import cache_name
from token_recycling.model.fingerprint import Fingerprint
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.model.limits import check_prompts, text_config
from token_recycling.model.lm_head import Float32Head, StockHead
from token_recycling.model.state import ModelState, while_training

Method = TypeVar("Method", bound=Callable[..., Any])


def inference_context_of(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return the inference context of ``model``: the context that disables gradients.

    Inference mode is faster, by a few percent of a step of a small model. Weights that are tensor
    subclasses, such as quantised ones, may not support it and get ``no_grad``.
    """
    if all(type(parameter.data) is Tensor for parameter in model.parameters()):
        return torch.inference_mode
    return torch.no_grad


def prompt_fraction(model: Any) -> float:
    """Return the fraction of a prompt's tokens whose logits cost at most ``PROMPT_COST``."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or not weight.numel():
        return 1.0
    parameters: int = sum(parameter.numel() for parameter in model.parameters())
    return min(1.0, PROMPT_COST * parameters / int(weight.numel()))


def _without_gradients(method: Method) -> Method:
    """Wrap a target's method to run in its inference context."""

    @wraps(method)
    def run(self: TreeTarget, *args: Any, **options: Any) -> Any:
        with self.inference_context():
            return method(self, *args, **options)

    return cast(Method, run)


def _learnt(prompt_mask: PromptMask | None, tokens: Tensor, valid: Tensor) -> Tensor:
    """Return which tokens of a chunk to learn from, bool [B, c]."""
    asked = valid if prompt_mask is None else prompt_mask(tokens)
    return torch.zeros_like(valid) if asked is None else asked.to(valid.device) & valid


class TreeTarget:
    """Any unmodified ``…ForCausalLM`` whose attention takes a 4D mask.

    Create it with ``probe.open_target``, which checks that the model computes trees correctly, and
    ask ``probe.probe_changes`` before every answer whether it still does.

    Attributes:
        batch_invariant: True if the logits of a node have the bits of a step of its own, whatever
            else is verified in the same forward (see ``probe.probe``). It holds for drafts of at
            most ``linear.FEW_TOKENS`` tokens a row.
        dtype: of the model's queries.
        shadow: what our forwards compute with (see ``skinny_kernels.shadow``).
        recordings: of steps of the shadow, on a CPU; None: elsewhere, and for other dtypes.
        fingerprint: of the model as it was adopted; None: it has not been looked at since a copy.
        adoptions: how often the model was adopted.
        refused: why trees are not verified in this state; None: they are.
    """

    state: ModelState
    dtype: torch.dtype
    shadow: Any
    recordings: Recordings | None
    fingerprint: Fingerprint | None

    def __init__(self, model: Any, lm_head: Float32Head | None = None) -> None:
        """Wrap ``model``, whose logits are computed inside the context ``lm_head``.

        Raises:
            TokenRecyclingError: the model cannot verify trees, by its configuration or because it
                overrides parts of ``generate``.
        """
        self.model, self.lm_head = model, lm_head or StockHead()
        self.adoptions = 0
        if type(model)._sample is not GenerationMixin._sample:
            raise TokenRecyclingError("its class overrides _sample")
        if (getattr(model, "tp_size", None) or 1) > 1:
            # Draft sizes depend on time, so that processes would disagree and wait for ever.
            raise TokenRecyclingError("it is tensor parallel (tp_plan)")
        state = ModelState(model)
        self.device, self.vocab_size = state.device, state.vocab_size
        self.adopt()
        self.reset()

    def adopt(self) -> None:
        """Take the model as it is now: its limits, its modules and the kernels that fit them.

        Raises:
            TokenRecyclingError: the model cannot verify trees in this state.
        """
        model = self.model
        self.adoptions += 1
        self.batch_invariant = False
        self.shadow = self.recordings = None  # frees weights that the model has no longer
        self.fingerprint = Fingerprint(model, self.device)
        self.state = state = ModelState(model)
        if state.device != self.device:
            raise TokenRecyclingError(f"the model is no longer on {self.device}")
        if state.vocab_size != self.vocab_size:
            raise TokenRecyclingError("the model's vocabulary has changed")
        self.max_positions, self.max_context = state.max_positions, state.max_context
        self.inference_context = inference_context_of(model)
        self.dtype = model.dtype
        self.config = text_config(model.config)
        takes = frozenset(inspect.signature(model.forward).parameters)
        self.takes_positions = "position_ids" in takes
        self.cache_name = cache_name(takes)
        self.slices_logits = "logits_to_keep" in takes
        self.prompt_fraction = prompt_fraction(model) if self.slices_logits else 1.0
        self.refused = self.foreign or while_training(model, state)
        if self.refused is None:
            self.lm_head.refresh()
            self.cast_shadow()

    def cast_shadow(self) -> None:
        """Make the shadow of the model, with the kernels of its device."""
        self.shadow, self.recordings = shadow_of(self.model), None
        self.lm_head.cover(self.shadow)
        if self.device.type == "cpu" and self.dtype in DTYPES:
            self.recordings = cpu_layers.cover(self.shadow, sdpa.packed_attention)
        elif self.device.type == "cuda" and has_device_kernels(self.device):
            gpu_layers.cover(self.shadow)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cache, and what belongs to this model object."""
        own = ("cache", "shadow", "recordings", "fingerprint")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, fingerprint=None)
        self.reset()

    def __copy__(self) -> TreeTarget:
        """Share all but the cache."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.reset()
        return twin

    @property
    def foreign(self) -> str | None:
        """Which unknown code in the model cannot be trusted (see ``Fingerprint``), or None."""
        found = None if self.fingerprint is None else self.fingerprint.foreign
        return found and f"{found}; whether it treats all tokens alike cannot be known"

    @property
    def windows(self) -> dict[str, AttentionWindow]:
        """Attention windows by layer type."""
        return self.state.windows

    @property
    def rounding(self) -> torch.dtype:
        """Dtype that is as coarse as what layers round their inputs to."""
        packed = any(isinstance(module, PackedLinear) for module in self.model.modules())
        return torch.bfloat16 if packed else self.dtype

    @property
    def is_warm(self) -> bool:
        """Whether the last step replayed a recording of its own size, or none is made."""
        return self.recordings is None or self.recordings.is_warm

    def deepest(self) -> list[int] | None:
        """Return the depth of the deepest node of each row to verify next; None: any.

        Deeper ones would be computed with other rounding than in plain steps, on a CPU.
        """
        if self.recordings is None:
            return None
        return list(map(deepest, self.cache.lengths))

    def reset(self) -> None:
        """Drop the context and free its memory."""
        self.cache = RecyclingCache(self.config.num_hidden_layers, 1)

    @_without_gradients
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
        """Read the prompts (see ``Target.prefill``)."""
        self.lm_head.refresh()
        share = 1.0 if whole_prompts or prompt_mask is None else self.prompt_fraction
        limit = self.max_positions
        check_prompts(prompts, None if limit is None else limit + 1)
        if self.recordings is None or len(prompts) == 1:
            if cached:
                self.cache.rewind([cached])
            else:
                self.cache = RecyclingCache(self.config.num_hidden_layers, len(prompts))
            return self._read(prompts, prompt_mask, learn_prompt, share, on_progress)
        # One by one, as they are read alone: PyTorch's kernels round by the number of tokens.
        read, total = 0, sum(map(len, prompts))

        def progress(tokens: int, of: int) -> None:
            if on_progress is not None:
                on_progress(read + tokens, total)

        ends, caches = [], []
        for prompt in prompts:
            self.reset()
            ends.append(self._read([prompt], prompt_mask, learn_prompt, share, progress))
            caches.append(self.cache)
            read += len(prompt)
        self.cache = caches[0]
        for cache in caches[1:]:
            self.cache.append(cache)
        return torch.cat(ends)

    def _read(
        self,
        prompts: list[list[int]],
        prompt_mask: PromptMask | None,
        learn_prompt: LearnPrompt | None,
        share: float,
        on_progress: OnProgress | None,
    ) -> Tensor:
        """Read prompts together, from the end of the cache on (see ``prefill``).

        Of the tokens of a chunk, at most ``share`` are learnt from.
        """
        batch, longest = len(prompts), max(map(len, prompts))
        self.cache.reserve(longest - self.cache.end)  # at once: growing copies all entries
        # Pad a row with its own last token: another token might overflow, and entries that are
        # not finite corrupt the row even when masked.
        rows = [prompt + prompt[-1:] * (longest - len(prompt)) for prompt in prompts]
        ids = torch.tensor(rows, device="cpu").to(self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        ends: Tensor | None = None
        chunk = max(1, defaults.PREFILL_CHUNK // batch)
        for begin in range(self.cache.end, longest, chunk):
            tokens = ids[:, begin : begin + chunk]
            size = tokens.shape[1]
            slots = torch.arange(begin + size, device=self.device)
            positions = slots[begin:].expand(batch, size)
            causal = slots <= slots[begin:, None]
            last = lengths - 1 - begin  # last prompt token of each row, relative to this chunk
            mask = torch.zeros_like(tokens, dtype=torch.bool)
            if learn_prompt is not None:
                mask = _learnt(prompt_mask, tokens, positions < lengths[:, None])
            columns = mask.any(dim=0).nonzero()[:, 0].tolist()
            columns = columns[-max(1, int(share * size)) :]
            ending = {n for n in last.tolist() if 0 <= n < size}
            computed = sorted({*columns, *ending})
            logits = self._forward(
                tokens,
                positions,
                causal.expand(batch, size, -1),
                slots.expand(batch, -1),
                computed,
                prompt=True,
            )
            self.cache.lengths = [begin + size] * batch
            if learn_prompt is not None and columns:
                learnt_logits = logits
                if columns != computed:
                    learnt_logits = logits[:, [computed.index(n) for n in columns]]
                learn_prompt(tokens[:, columns], learnt_logits, mask[:, columns])
            if ends is None:
                ends = logits.new_zeros(batch, logits.shape[-1])
            for row, at in enumerate(last.tolist()):
                if 0 <= at < size:
                    ends[row] = logits[row, computed.index(at)]
            if on_progress is not None:
                on_progress(min(begin + size, longest), longest)
        self.cache.lengths = [len(prompt) for prompt in prompts]
        assert ends is not None
        return ends

    @_without_gradients
    def recompute(self, tokens: list[int], begin: int) -> float:
        """Read ``tokens`` of a single row again from slot ``begin`` on, and drop later entries.

        Returns:
            The root mean square difference between new and cached keys or values, relative to
            their root mean square; the largest over all layers. NaN counts as infinite.
        """
        end = begin + len(tokens)
        before = self.cache.entries(begin, end)
        self.cache.rewind([begin])
        slots = torch.arange(end, device=self.device)
        positions = slots[begin:][None]
        visible = (slots <= slots[begin:, None])[None]
        ids = torch.tensor([tokens], device=self.device)
        lengths = torch.tensor([begin], device=self.device)
        chain = (lengths, visible[:, :, begin:])
        self._forward(ids, positions, visible, slots[None], [len(tokens) - 1], draft=chain)
        self.cache.lengths = [end]
        recomputed = self.cache.entries(begin, end)
        worst = 0.0
        for old, now in zip(before, recomputed):
            far = (old.float() - now.float()).square().mean().sqrt()
            size = now.float().square().mean().sqrt()
            off = float(far / size.clamp(min=1e-9))
            worst = max(worst, off if off == off else float("inf"))  # NaN counts as infinite
        return worst

    def positions(self, lengths: Tensor, draft: DraftTree) -> Tensor:
        """Return each node's position, int64 [B, n], after ``lengths`` int64 [B, 1] tokens."""
        positions = lengths + draft.depths
        if self.max_positions is None:
            return positions
        # A node beyond the last position can be drafted but never emitted, since the length limit
        # ends the row first. Clamp it to stay inside a table of learned positions.
        return positions.clamp(max=self.max_positions - 1)

    @_without_gradients
    def verify(self, draft: DraftTree) -> Tensor:
        """Return the logits [B, n, V] of every node in one forward."""
        nodes = draft.size
        if self.recordings is not None:
            draft = draft.padded(self.recordings.fill_up(len(draft.tokens), nodes))
        draft = draft.to(self.device)
        tokens = draft.tokens.contiguous()
        lengths = torch.tensor(self.cache.lengths, device=self.device)[:, None]
        positions = self.positions(lengths, draft)

        def forward() -> Tensor:
            batch, n = tokens.shape
            slots = torch.arange(self.cache.end, device=self.device).expand(batch, -1)
            committed = (slots < lengths)[:, None].expand(batch, n, -1)
            return self._forward(
                tokens,
                positions,
                torch.cat([committed, draft.ancestors], dim=2),
                torch.cat([slots, positions], dim=1),
                draft=(lengths[:, 0], draft.ancestors),
            )

        if self.recordings is None:
            return forward()
        self.cache.reserve(tokens.shape[1])
        step = StepInputs(tokens, positions, draft.ancestors, self.cache, self.windows, self.dtype)
        return self.recordings.logits(step, forward)[:, :nodes]

    def steps(self, tokens: list[int]) -> list[Tensor]:
        """Read tokens of a single row one by one; return the logits [1, V] after each."""
        logits = []
        for token in tokens:
            logits.append(self.verify(root_only(torch.tensor([token], device="cpu")))[:, 0])
            self.commit(torch.zeros((1, 1), dtype=torch.long, device="cpu"), [1])
        return logits

    @_without_gradients
    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Commit the last draft's nodes ``path[b, :counts[b]]`` (``path``: int64 [B, p])."""
        self.cache.commit(path, counts)

    @_without_gradients
    def clear_drafts(self) -> None:
        """Overwrite uncommitted cache entries (see ``RecyclingCache.clear_drafts``)."""
        self.cache.clear_drafts()

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        logits_at: list[int] | None = None,
        *,
        draft: tuple[Tensor, Tensor] | None = None,
        prompt: bool = False,
    ) -> Tensor:
        """Run the model over ``tokens`` [B, q]; return all logits, or those at ``logits_at``.

        ``visible`` (bool [B, q, s]) and ``key_positions`` (int64 [B, s]) cover all slots up to and
        including the new ones. ``draft``: lengths and ancestors of few tokens behind the longest
        row (see ``sdpa.add_views``). ``prompt``: ``visible`` is causal.
        """
        self.cache.reserve(tokens.shape[1])
        masks = additive_masks(self.windows, visible, positions, key_positions, self.dtype)
        if draft is not None:
            sdpa.pack_queries(masks, None if self.recordings is None else draft[0])
            sdpa.add_views(masks, self.windows, draft[0], positions, draft[1])
        elif prompt:
            sdpa.mark_prompt(masks, self.windows, visible.shape[2] - tokens.shape[1])
        more: dict[str, Any] = {}
        sliced = logits_at is not None and self.slices_logits
        if sliced:  # a chunk may need no logits; compute one position then
            more["logits_to_keep"] = torch.tensor(logits_at or [0], device=self.device)
        logits = self.compute(tokens, masks, positions, self.cache, **more)
        return logits if logits_at is None or sliced else logits[:, logits_at or [0]]

    def compute(
        self, tokens: Tensor, masks: Any, positions: Tensor, cache: Any, **more: Any
    ) -> Tensor:
        """Return the logits of a forward of the shadow.

        Args:
            tokens: int64 [B, q].
            masks: see ``windows.additive_masks``.
            positions: int64 [B, q].
            cache: gets the keys and values.
            **more: other arguments.
        """
        if self.takes_positions:
            more["position_ids"] = positions
        more[self.cache_name] = cache
        with sdpa.PackedSdpa():
            output = self.shadow(
                input_ids=tokens, attention_mask=masks, use_cache=True, return_dict=True, **more
            )
        logits: Tensor = output.logits.to(self.device)
        return logits

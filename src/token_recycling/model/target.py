"""The target: a stock Transformers model that verifies draft trees."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from transformers import GenerationMixin

from token_recycling import defaults
from token_recycling.errors import TokenRecyclingError
from token_recycling.model import attention
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.model.limits import (
    AttentionWindow,
    attention_windows,
    check_prompts,
    context_limit,
    input_device,
    least,
    position_limit,
    slot_limit,
    text_config,
    vocabulary,
)
from token_recycling.model.lm_head import Float32Head, StockHead
from token_recycling.model.masks import additive_masks
from token_recycling.model.skinny_gemm import MOST_ROWS, SkinnyGemm, pays
from token_recycling.model.training import is_repeatable, mode, train_time_behaviour
from token_recycling.tree import DraftTree

# tokens [B, c] of a chunk of the prompts -> bool [B, c]: which to learn from; None: none
PromptMask = Callable[[Tensor], Tensor | None]
# (tokens [B, w], logits [B, w, V], mask [B, w]) of those columns of a chunk
LearnPrompt = Callable[[Tensor, Tensor, Tensor], None]
# (prompt tokens done, prompt tokens in all)
OnProgress = Callable[[int, int], None]


ATTENTION = ("eager", "sdpa")  # flash takes no 4D mask; flex ends the process with one
# Methods of generate that a model may replace, and what a soft prompt replaces.
DECODING = ("_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
PROMPT_COST = 0.05  # of the cost of reading a prompt, for logits to learn from


class Target(Protocol):
    """What the decoding loop asks of a model."""

    device: torch.device
    vocab_size: int
    max_context: int | None

    @property
    def lm_head(self) -> Float32Head | StockHead:
        """What its forwards compute their logits inside."""

    inference_context: Callable[[], AbstractContextManager[Any]]

    def prefill(
        self,
        prompts: list[list[int]],
        *,
        prompt_mask: PromptMask | None = None,
        learn_prompt: LearnPrompt | None = None,
        on_progress: OnProgress | None = None,
        cached: int = 0,
    ) -> Tensor:
        """Read the prompts and return the logits [B, V] after each.

        Args:
            prompts: B lists of tokens.
            prompt_mask: says of which prompt tokens logits are computed; None: of all. No more
                than add a twentieth to the cost of reading the prompt, the last ones first.
            learn_prompt: gets them, chunk by chunk. None: nothing is computed for it.
            on_progress: called after every chunk.
            cached: continue after the first ``cached`` tokens of a single row, read before.

        Raises:
            TokenRecyclingError: a prompt is empty, or leaves no room in the context.
        """

    def verify(self, draft: DraftTree) -> Tensor:
        """Return the logits [B, n, V] of every node in one forward."""

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Keep the first ``counts[b]`` nodes of ``path[b]`` (int64 [B, p]) of the last draft."""

    def clear_drafts(self) -> None:
        """Overwrite what is not committed, so that it cannot spoil a later forward."""

    def reset(self) -> None:
        """Forget the context and free its memory."""


def inference_context_of(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return what keeps gradients out of a forward of ``model``.

    Inference mode is the faster one, by some percent of a step of a small model. Weights that
    are a tensor class of their own, as quantised ones are, may not bear it.
    """
    if all(type(parameter.data) is Tensor for parameter in model.parameters()):
        return torch.inference_mode
    return torch.no_grad


def prompt_fraction(model: Any) -> float:
    """Share of a prompt's tokens whose logits cost no more than ``PROMPT_COST`` of reading it."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if weight is None or not weight.numel():
        return 1.0
    parameters: int = sum(parameter.numel() for parameter in model.parameters())
    return min(1.0, PROMPT_COST * parameters / int(weight.numel()))


Method = TypeVar("Method", bound=Callable[..., Any])


def _without_gradients(method: Method) -> Method:
    """Run a target's method in its inference context."""

    @wraps(method)
    def run(self: Target, *args: Any, **options: Any) -> Any:
        with self.inference_context():
            return method(self, *args, **options)

    return cast(Method, run)


def _learnt(prompt_mask: PromptMask | None, tokens: Tensor, valid: Tensor) -> Tensor:
    """Which tokens of a chunk are learnt from: bool [B, c]."""
    asked = valid if prompt_mask is None else prompt_mask(tokens)
    return torch.zeros_like(valid) if asked is None else asked & valid


class TreeTarget:
    """Any ``…ForCausalLM`` whose attention takes a 4D mask, as it comes.

    Use ``probe.open_target`` to make one: it makes sure that the model computes trees right.
    """

    def __init__(self, model: Any, lm_head: Float32Head | None = None) -> None:
        """Wrap ``model``; its logits are computed inside ``lm_head`` (see ``Float32Head``).

        Raises:
            TokenRecyclingError: its configuration names layers that cannot branch.
        """
        self.model, self.lm_head = model, lm_head or StockHead()
        self.inference_context = inference_context_of(model)
        self.config = text_config(model.config)
        self.device: torch.device = input_device(model)
        attention.install()
        self.vocab_size = vocabulary(model)
        self.max_context = least(context_limit(model.config), slot_limit(model.config))
        self.windows, self.max_positions = self._limits()
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self.takes_positions = "position_ids" in self._takes
        skinny = self.device.type == "cpu" and self.dtype == torch.float32 and pays()
        self.skinny_gemm = SkinnyGemm(model) if skinny else None
        self.prompt_fraction = prompt_fraction(model) if "logits_to_keep" in self._takes else 1.0
        if type(model)._sample is not GenerationMixin._sample:
            raise TokenRecyclingError("its class samples in a way of its own")
        self._tried: tuple[Any, ...] = ()  # the training mode that ``_repeatable`` is known of
        self._repeatable = True
        if reason := self._other_model():
            raise TokenRecyclingError(reason)
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins without a context."""
        return {name: value for name, value in self.__dict__.items() if name != "cache"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.reset()

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's queries."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def changed(self) -> str | None:
        """Say why the model, as it is now, is not the one that the probe saw, or None."""
        return self._other_model() or self._trains()

    def _other_model(self) -> str | None:
        attention = getattr(self.config, "_attn_implementation", None) or "eager"
        if attention not in ATTENTION:
            return f"its attention is {attention}, which takes no tree; choose sdpa or eager"
        if self.vocab_size != vocabulary(self.model):
            return "its vocabulary has changed"
        if self._limits() != (self.windows, self.max_positions):
            return "its attention windows or its positions have changed"
        if self.device != input_device(self.model):
            return f"it has moved from {self.device}"
        own = [name for name in DECODING if name in self.model.__dict__]
        return f"the object has a {own[0]} of its own" if own else None

    def _limits(self) -> tuple[dict[str, AttentionWindow], int | None]:
        """How far layers see, and where positions end, by the configuration as it is now.

        Raises:
            TokenRecyclingError: a layer keeps a state, or there is no room.
        """
        config = self.model.config
        return attention_windows(config), least(position_limit(config), slot_limit(config))

    def _trains(self) -> str | None:
        """Say why training mode matters, or None where it computes the same."""
        reason = train_time_behaviour(self.model)
        training = mode(self.model) if reason is None else ()
        if training and training != self._tried:
            with self.inference_context():
                self._repeatable = is_repeatable(self.model, self.vocab_size, self.device)
            self._tried = training
        if training and not self._repeatable:
            reason = "it does not compute a text alike twice"
        return (
            None if reason is None else f"it is in training mode, and {reason}; call model.eval()"
        )

    def reset(self) -> None:
        """Forget the context and free its memory."""
        self.cache = RecyclingCache(self.config.num_hidden_layers, 1)

    @_without_gradients
    def prefill(
        self,
        prompts: list[list[int]],
        *,
        prompt_mask: PromptMask | None = None,
        learn_prompt: LearnPrompt | None = None,
        on_progress: OnProgress | None = None,
        cached: int = 0,
    ) -> Tensor:
        """Read the prompts (see ``Target.prefill``)."""
        if reason := self.changed():
            raise TokenRecyclingError(f"the model cannot be used: {reason}")
        self.lm_head.refresh()
        if self.skinny_gemm is not None:
            self.skinny_gemm.prepare()
        limit = self.max_positions
        check_prompts(prompts, None if limit is None else limit + 1)
        batch, longest = len(prompts), max(map(len, prompts))
        if cached:
            self.cache.rewind([cached])
        else:
            self.cache = RecyclingCache(self.config.num_hidden_layers, batch)
        # Behind its end a row repeats its last token: another one might overflow, and masked
        # entries that are not finite would spoil the row.
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
            last = lengths - 1 - begin  # where each row's prompt ends, counted from this chunk
            mask = torch.zeros_like(tokens, dtype=torch.bool)
            if learn_prompt is not None:
                mask = _learnt(prompt_mask, tokens, positions < lengths[:, None])
            columns = mask.any(dim=0).nonzero()[:, 0].tolist()
            if prompt_mask is not None:
                columns = columns[-max(1, int(self.prompt_fraction * size)) :]
            ending = {n for n in last.tolist() if 0 <= n < size}
            computed = sorted({*columns, *ending})
            logits = self._forward(
                tokens, positions, causal.expand(batch, size, -1), slots.expand(batch, -1), computed
            )
            self.cache.lengths = [begin + size] * batch
            if learn_prompt is not None and columns:
                found = logits
                if columns != computed:
                    found = logits[:, [computed.index(n) for n in columns]]
                learn_prompt(tokens[:, columns], found, mask[:, columns])
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
    def reread(self, tokens: list[int], begin: int) -> float:
        """Read ``tokens`` of a single row again, from slot ``begin`` on, and forget what follows.

        Returns:
            How far keys and values are from those that the cache held, in units of their root
            mean square; the largest of all layers. Infinite where they cannot be compared.
        """
        end = begin + len(tokens)
        before = self.cache.entries(begin, end)
        self.cache.rewind([begin])
        slots = torch.arange(end, device=self.device)
        positions = slots[begin:][None]
        visible = (slots <= slots[begin:, None])[None]
        ids = torch.tensor([tokens], device=self.device)
        self._forward(ids, positions, visible, slots[None], [len(tokens) - 1], packs=True)
        self.cache.lengths = [end]
        found = self.cache.entries(begin, end)
        worst = 0.0
        for old, now in zip(before, found):
            far = (old.float() - now.float()).square().mean().sqrt()
            size = now.float().square().mean().sqrt()
            off = float(far / size.clamp(min=1e-9))
            worst = max(worst, off if off == off else float("inf"))  # NaN is far, too
        return worst

    def positions(self, lengths: Tensor, draft: DraftTree) -> Tensor:
        """Return each node's position, int64 [B, n], behind ``lengths`` int64 [B, 1]."""
        positions = lengths + draft.depths
        if self.max_positions is None:
            return positions
        # A node behind the last position can be drafted but never emitted: the length limit
        # ends the row before. It must only not reach past a table of learned positions.
        return positions.clamp(max=self.max_positions - 1)

    @_without_gradients
    def verify(self, draft: DraftTree) -> Tensor:
        """Return the logits [B, n, V] of every node in one forward."""
        batch, n = draft.tokens.shape
        lengths = torch.tensor(self.cache.lengths, device=self.device)[:, None]
        slots = torch.arange(self.cache.end, device=self.device).expand(batch, -1)
        committed = (slots < lengths)[:, None].expand(batch, n, -1)
        positions = self.positions(lengths, draft)
        return self._forward(
            draft.tokens,
            positions,
            torch.cat([committed, draft.ancestors], dim=2),
            torch.cat([slots, positions], dim=1),
            packs=True,
        )

    @_without_gradients
    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Keep the first ``counts[b]`` nodes of ``path[b]`` of the last draft."""
        self.cache.commit(path, counts)

    @_without_gradients
    def clear_drafts(self) -> None:
        """Overwrite what is not committed (see ``RecyclingCache.clear_drafts``)."""
        self.cache.clear_drafts()

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        logits_at: list[int] | None = None,
        *,
        packs: bool = False,
    ) -> Tensor:
        """Run the model over ``tokens`` [B, q]; return the logits of all, or at ``logits_at``.

        ``visible`` is bool [B, q, s] and ``key_positions`` int64 [B, s] over all slots up to and
        including the new ones. ``packs``: see ``attention.pack_queries``.
        """
        self.cache.reserve(tokens.shape[1])
        masks = additive_masks(self.windows, visible, positions, key_positions, self.dtype)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": attention.pack_queries(masks) if packs else masks,
            "position_ids": positions,
        }
        if not self.takes_positions:
            del inputs["position_ids"]
        sliced = logits_at is not None and "logits_to_keep" in self._takes
        if sliced:  # a chunk in which no prompt ends needs one row of logits at most
            inputs["logits_to_keep"] = torch.tensor(logits_at or [0], device=self.device)
        skinny = self.skinny_gemm if 1 < tokens.numel() <= MOST_ROWS else None
        with self.lm_head, skinny or nullcontext():
            output = self.model(
                **inputs, past_key_values=self.cache, use_cache=True, return_dict=True
            )
        logits: Tensor = output.logits.to(self.device)
        return logits if logits_at is None or sliced else logits[:, logits_at or [0]]

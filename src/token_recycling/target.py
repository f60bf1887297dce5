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

from token_recycling import attention, defaults
from token_recycling.cache import RecyclingCache
from token_recycling.errors import TokenRecyclingError
from token_recycling.exact import ExactHead, UnchangedHead
from token_recycling.masks import (
    Reach,
    additive_masks,
    input_device,
    layer_reaches,
    text_config,
    vocabulary,
)
from token_recycling.narrow import MOST_ROWS, NarrowProducts, pays
from token_recycling.training import is_repeatable, mode, train_time_behaviour
from token_recycling.tree import DraftTree

# (tokens [B, w], logits [B, w, V], valid [B, w]) of some tokens of a chunk of the prompts
OnPrompt = Callable[[Tensor, Tensor, Tensor], None]
# tokens [B, c] of a chunk -> bool [B, c]: which of them on_prompt gets, or None: not one
Wants = Callable[[Tensor], Tensor | None]
# (prompt tokens done, prompt tokens in all)
OnProgress = Callable[[int, int], None]


# Rotary kinds whose angles are the same function of the position at every length.
GROWING_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}
ATTENTION = ("eager", "sdpa")  # flash takes no 4D mask; flex ends the process with one
# Methods of generate that a model may replace, and what a soft prompt replaces.
DECODING = ("_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
PRIMING = 0.05  # of the cost of reading a prompt, for logits to learn from
TREE_ROOM = 256  # slots kept free for the nodes of a draft
SHORTEST_CONTEXT = 64  # below this a limit is a refusal


class Target(Protocol):
    """What the decoding loop asks of a model."""

    device: torch.device
    vocab_size: int
    max_context: int | None

    @property
    def exact(self) -> ExactHead | UnchangedHead:
        """What its forwards compute their logits inside."""

    guard: Callable[[], AbstractContextManager[Any]]

    def prefill(
        self,
        prompts: list[list[int]],
        *,
        on_prompt: OnPrompt | None = None,
        wants: Wants | None = None,
        on_progress: OnProgress | None = None,
        keep: int = 0,
    ) -> Tensor:
        """Read the prompts and return the logits [B, V] after each.

        Args:
            prompts: B lists of tokens.
            on_prompt: gets logits of prompt tokens, chunk by chunk.
            wants: says which; None: all. Others are not computed, nor more than add a twentieth
                to the cost of the reading: the last ones count.
            on_progress: called after every chunk.
            keep: go on after the first ``keep`` tokens, which a single row read before.

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


def context_limit(config: Any) -> int | None:
    """Positions that the model knows, or None where its configuration does not say.

    A model with two sets of rotary factors (longrope: Phi-3's long versions) changes them at its
    original length; entries computed before would be stale, so that is the limit here.
    """
    config = text_config(config)
    limit = getattr(config, "max_position_embeddings", None) or 0
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        original = getattr(config, "original_max_position_embeddings", None)
        limit = original or rope.get("original_max_position_embeddings") or limit
    return int(limit) if limit > 0 else None


def position_limit(config: Any) -> int | None:
    """Positions beyond which a tree cannot be computed, or None where rotary angles go on.

    Beyond ``context_limit`` a model with plain rotary positions still computes what ``generate``
    computes. A table of learned positions ends there, and other rotary kinds change their factors.
    """
    config = text_config(config)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not rope and getattr(config, "rope_theta", None) is None:
        return context_limit(config)
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    kinds = {part.get("rope_type", part.get("type", "default")) for part in parts}
    return None if kinds <= GROWING_ROPE else context_limit(config)


def slot_limit(config: Any) -> int | None:
    """Cache slots up to which a model's attention depends on masks and positions alone.

    Some have a rule that counts slots and that begins late, longer than the probe is. In front of
    it nothing is lost; behind it siblings in a tree would not be computed like their paths.

    Returns:
        The slots that a context may use, a tree's left out; None where there is no such rule.

    Raises:
        TokenRecyclingError: the rule begins too early to leave any room.
    """
    config = text_config(config)
    begins = []
    if getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers):
        begins.append(config.floor_scale - 1)  # Llama-4 scales queries by slot
    if keep := getattr(config, "keep_window_size", None):
        begins.append(keep)  # Doge keeps so many keys, and breaks ties by slot
    if not begins:
        return None
    limit = min(begins) - TREE_ROOM
    if limit < SHORTEST_CONTEXT:
        raise TokenRecyclingError(f"its attention counts cache slots beyond {min(begins)}")
    return int(limit)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def check_prompts(prompts: list[list[int]], limit: int | None) -> None:
    """Refuse prompts that cannot be read.

    Raises:
        TokenRecyclingError: a prompt is empty, or leaves no room in the context.
    """
    for prompt in prompts:
        if not prompt:
            raise TokenRecyclingError("the prompt is empty")
        if limit is not None and len(prompt) >= limit:
            raise TokenRecyclingError(
                f"the prompt has {len(prompt)} tokens and the model's context {limit}; shorten it"
            )


def gradient_guard(model: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Return what keeps gradients out of a forward of ``model``.

    Inference mode is the faster one, by some percent of a step of a small model. Weights that
    are a tensor class of their own, as quantised ones are, may not bear it.
    """
    if all(type(parameter.data) is Tensor for parameter in model.parameters()):
        return torch.inference_mode
    return torch.no_grad


def primed_share(model: Any) -> float:
    """Share of a prompt's tokens whose logits cost no more than ``PRIMING`` of reading it."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if weight is None or not weight.numel():
        return 1.0
    parameters: int = sum(parameter.numel() for parameter in model.parameters())
    return min(1.0, PRIMING * parameters / int(weight.numel()))


Method = TypeVar("Method", bound=Callable[..., Any])


def _guarded(method: Method) -> Method:
    """Run a target's method under its guard."""

    @wraps(method)
    def run(self: Target, *args: Any, **options: Any) -> Any:
        with self.guard():
            return method(self, *args, **options)

    return cast(Method, run)


def _wanted(
    on_prompt: OnPrompt | None, wants: Wants | None, tokens: Tensor, valid: Tensor
) -> Tensor:
    """Which tokens of a chunk ``on_prompt`` gets: bool [B, c]."""
    if on_prompt is None:
        return torch.zeros_like(valid)
    asked = valid if wants is None else wants(tokens)
    return torch.zeros_like(valid) if asked is None else asked & valid


class TreeTarget:
    """Any ``…ForCausalLM`` whose attention takes a 4D mask, as it comes.

    Use ``probe.open_target`` to make one: it makes sure that the model computes trees right.
    """

    def __init__(self, model: Any, exact: ExactHead | None = None) -> None:
        """Wrap ``model``; its logits are computed inside ``exact`` (see ``ExactHead``).

        Raises:
            TokenRecyclingError: its configuration names layers that cannot branch.
        """
        self.model, self.exact = model, exact or UnchangedHead()
        self.guard = gradient_guard(model)
        self.config = text_config(model.config)
        self.device: torch.device = input_device(model)
        attention.install()
        self.vocab_size = vocabulary(model)
        self.max_context = _least(context_limit(model.config), slot_limit(model.config))
        self.reaches, self.max_positions = self._limits()
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self.takes_positions = "position_ids" in self._takes
        narrow = self.device.type == "cpu" and self.dtype == torch.float32 and pays()
        self.narrow = NarrowProducts(model) if narrow else None
        self.primed = primed_share(model) if "logits_to_keep" in self._takes else 1.0
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
        if self._limits() != (self.reaches, self.max_positions):
            return "its attention windows or its positions have changed"
        if self.device != input_device(self.model):
            return f"it has moved from {self.device}"
        own = [name for name in DECODING if name in self.model.__dict__]
        return f"the object has a {own[0]} of its own" if own else None

    def _limits(self) -> tuple[dict[str, Reach], int | None]:
        """How far layers see, and where positions end, by the configuration as it is now.

        Raises:
            TokenRecyclingError: a layer keeps a state, or there is no room.
        """
        config = self.model.config
        return layer_reaches(config), _least(position_limit(config), slot_limit(config))

    def _trains(self) -> str | None:
        """Say why training mode matters, or None where it computes the same."""
        reason = train_time_behaviour(self.model)
        training = mode(self.model) if reason is None else ()
        if training and training != self._tried:
            with self.guard():
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

    @_guarded
    def prefill(
        self,
        prompts: list[list[int]],
        *,
        on_prompt: OnPrompt | None = None,
        wants: Wants | None = None,
        on_progress: OnProgress | None = None,
        keep: int = 0,
    ) -> Tensor:
        """Read the prompts (see ``Target.prefill``)."""
        if reason := self.changed():
            raise TokenRecyclingError(f"the model cannot be used: {reason}")
        self.exact.refresh()
        if self.narrow is not None:
            self.narrow.prepare()
        limit = self.max_positions
        check_prompts(prompts, None if limit is None else limit + 1)
        batch, longest = len(prompts), max(map(len, prompts))
        if keep:
            self.cache.rewind([keep])
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
            wanted = _wanted(on_prompt, wants, tokens, positions < lengths[:, None])
            columns = wanted.any(dim=0).nonzero()[:, 0].tolist()
            if wants is not None:
                columns = columns[-max(1, int(self.primed * size)) :]
            ending = {n for n in last.tolist() if 0 <= n < size}
            kept = sorted({*columns, *ending})
            logits = self._forward(
                tokens, positions, causal.expand(batch, size, -1), slots.expand(batch, -1), kept
            )
            self.cache.lengths = [begin + size] * batch
            if on_prompt is not None and columns:
                found = logits if columns == kept else logits[:, [kept.index(n) for n in columns]]
                on_prompt(tokens[:, columns], found, wanted[:, columns])
            if ends is None:
                ends = logits.new_zeros(batch, logits.shape[-1])
            for row, at in enumerate(last.tolist()):
                if 0 <= at < size:
                    ends[row] = logits[row, kept.index(at)]
            if on_progress is not None:
                on_progress(min(begin + size, longest), longest)
        self.cache.lengths = [len(prompt) for prompt in prompts]
        assert ends is not None
        return ends

    @_guarded
    def reread(self, tokens: list[int], begin: int) -> float:
        """Read ``tokens`` of a single row again, from slot ``begin`` on, and forget what follows.

        Returns:
            How far keys and values are from those that the cache held, in units of their root
            mean square; the largest of all layers. Infinite where they cannot be compared.
        """
        end = begin + len(tokens)
        held = self.cache.entries(begin, end)
        self.cache.rewind([begin])
        slots = torch.arange(end, device=self.device)
        positions = slots[begin:][None]
        visible = (slots <= slots[begin:, None])[None]
        ids = torch.tensor([tokens], device=self.device)
        self._forward(ids, positions, visible, slots[None], [len(tokens) - 1], packs=True)
        self.cache.lengths = [end]
        found = self.cache.entries(begin, end)
        worst = 0.0
        for before, now in zip(held, found):
            far = (before.float() - now.float()).square().mean().sqrt()
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

    @_guarded
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

    @_guarded
    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Keep the first ``counts[b]`` nodes of ``path[b]`` of the last draft."""
        self.cache.commit(path, counts)

    @_guarded
    def clear_drafts(self) -> None:
        """Overwrite what is not committed (see ``RecyclingCache.clear_drafts``)."""
        self.cache.clear_drafts()

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        key_positions: Tensor,
        keep: list[int] | None = None,
        *,
        packs: bool = False,
    ) -> Tensor:
        """Run the model over ``tokens`` [B, q]; the logits of all, or of the indices in ``keep``.

        ``visible`` is bool [B, q, s] and ``key_positions`` int64 [B, s] over all slots up to and
        including the new ones. ``packs``: see ``attention.pack_queries``.
        """
        self.cache.reserve(tokens.shape[1])
        masks = additive_masks(self.reaches, visible, positions, key_positions, self.dtype)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": attention.pack_queries(masks) if packs else masks,
            "position_ids": positions,
        }
        if not self.takes_positions:
            del inputs["position_ids"]
        sliced = keep is not None and "logits_to_keep" in self._takes
        if sliced:  # a chunk in which no prompt ends needs one row of logits at most
            inputs["logits_to_keep"] = torch.tensor(keep or [0], device=self.device)
        few = 1 < tokens.numel() <= MOST_ROWS
        with self.exact, self.narrow if few and self.narrow is not None else nullcontext():
            output = self.model(
                **inputs, past_key_values=self.cache, use_cache=True, return_dict=True
            )
        logits: Tensor = output.logits.to(self.device)
        return logits if keep is None or sliced else logits[:, keep or [0]]

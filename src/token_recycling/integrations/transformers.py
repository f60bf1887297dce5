"""Inside Transformers: ``generate(custom_generate=recycler)`` and ``enable(model)``.

``generate`` prepares everything (processors, criteria, padding, cache) and then calls a decoding
method. A recycler is such a method; whatever it cannot serve goes on to the method that
``generate`` would have called.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.utils import GENERATION_MODES_MAPPING

from token_recycling.accept import (
    Acceptor,
    FollowAcceptor,
    GreedyAcceptor,
    ordinary_tensors,
)
from token_recycling.draws import BatchDraws
from token_recycling.errors import PlainDecodingWarning, TokenRecyclingError
from token_recycling.integrations.criteria import ColumnRules, CriteriaRules, looks_at_batch
from token_recycling.integrations.handover import hand_out, read_padding, take_in
from token_recycling.integrations.request import Collector, Request
from token_recycling.metrics import Stats
from token_recycling.override import Override, is_covered
from token_recycling.target import TreeTarget

if TYPE_CHECKING:
    from token_recycling.adjacency import AdjacencyMatrix
    from token_recycling.api import TokenRecycling


def enable(model: Any, tokenizer: Any = None, **options: Any) -> Enabled:
    """Let ``model.generate`` recycle, and with it ``pipeline`` and everything else that calls it.

    Args:
        model: a Transformers ``…ForCausalLM``, or what has one inside: a pipeline, a model of
            peft, a compiled one, … Its own ``generate`` is covered on this instance until
            ``disable``; a copy or a pickle of the model has the stock one.
        tokenizer: its tokenizer, for the fingerprint of a saved matrix.
        **options: those of ``TokenRecycling``: ``drafter``, ``tree``, ``k``, ``matrix``,
            ``exact_logits``, ``queue``, and ``strict``, to raise where a model or a call cannot
            be served, instead of decoding it plainly with a ``PlainDecodingWarning``.

    Returns:
        What to call ``disable`` on; a context manager too.

    Raises:
        TokenRecyclingError: see ``TokenRecycling``.
    """
    from token_recycling.api import TokenRecycling

    return Enabled(TokenRecycling(model, tokenizer, **options))


class Enabled:
    """A model whose ``generate`` recycles, until ``disable`` or the end of a ``with`` block."""

    def __init__(self, recycler: TokenRecycling) -> None:
        """Cover ``generate`` of the recycler's model.

        Raises:
            TokenRecyclingError: the model object has a ``generate`` that is not its class's.
        """
        self.recycler = recycler
        model = recycler.model
        before = model.__dict__.get("generate")
        if before is not None and not isinstance(before, Override):
            raise TokenRecyclingError(
                "the model brings a generate of its own; give it custom_generate instead"
            )
        # Enabled twice, the later one serves alone.
        self._overrides = [self._cover("generate", _covered)]
        for name in CONTINUOUS:
            if hasattr(type(model), name):
                self._overrides.append(self._cover(name, _continuous))

    def _cover(self, name: str, call: Callable[..., Any]) -> Override:
        model = self.recycler.model
        call = functools.partial(call, self.recycler)
        override = Override(model, name, call, model.__dict__.get(name))
        setattr(model, name, override)
        return override

    def __reduce__(self) -> Any:
        """A copy is one of a copied model, enabled where this one is."""
        return _enabled_again, (self.recycler, self._overrides[0].call is not None)

    def disable(self) -> None:
        """Give the model its ``generate`` back; do nothing the second time."""
        model = self.recycler.model
        for override in self._overrides:
            override.call = None
            current = model.__dict__.get(override.__name__)
            while isinstance(current, Override) and current.call is None:
                current = current.before
            if current is not None:
                setattr(model, override.__name__, current)
            else:
                model.__dict__.pop(override.__name__, None)

    @property
    def stats(self) -> Stats:
        """Of all answers so far, added up."""
        return self.recycler.stats

    @property
    def matrix(self) -> AdjacencyMatrix:
        """The adjacency matrix, kept from call to call."""
        return self.recycler.matrix

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.disable()


def _enabled_again(recycler: TokenRecycling, on: bool) -> Enabled:
    enabled = Enabled(recycler)
    if not on:
        enabled.disable()
    return enabled


# Continuous batching: a cache, a scheduler and a sampler of its own, into which no tree fits.
CONTINUOUS = ("generate_batch", "init_continuous_batching")


def _continuous(recycler: TokenRecycling, stock: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Say that continuous batching is decoded plainly."""
    _tell(recycler, "continuous batching has a cache and a loop of its own")
    return stock(*args, **kw)


# Options of the decoding methods that Transformers keeps on the hub.
HUB_METHODS = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "num_beam_groups": "group beam search",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}


def _covered(recycler: TokenRecycling, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``generate`` with the recycler as its decoding method, if none is asked for."""
    given = inspect.signature(stock).bind_partial(*args, **kwargs).arguments
    if given.get("custom_generate") is not None:
        return stock(*args, **kwargs)
    with _ended(given.get("streamer")):
        configs = (given.get("generation_config"), recycler.model.generation_config)
        for name, method in HUB_METHODS.items():
            values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
            if all(value in (None, 1) for value in values):
                continue
            if isinstance(recycler.target, TreeTarget):
                _tell(recycler, f"{method} is asked for")
            return stock(*args, **kwargs)
        return stock(*args, **{**kwargs, "custom_generate": recycler})


def mend(model: Any) -> None:
    """Let ``generate`` hand ``streamer``, ``tokenizer`` and the like to a recycler.

    Transformers (4.57 to 5.23 at least) collects them and then, for a callable, replaces the
    collection by the callable's own arguments. This instance's collector does not for ours.
    """
    name = "_extract_generation_mode_kwargs"
    if not is_covered(model, name):
        setattr(model, name, Override(model, name, _extract))


def _extract(
    stock: Callable[..., dict[str, Any]],
    custom_generate: Any,
    kwargs: dict[str, Any],
    *others: Any,
) -> dict[str, Any]:
    from token_recycling.api import TokenRecycling

    if not isinstance(custom_generate, TokenRecycling | Collector):
        return stock(custom_generate, kwargs, *others)
    found = stock(None, kwargs, *others)
    found["own_cache"] = kwargs.get("past_key_values") is not None
    return found


@contextmanager
def _ended(streamer: Any) -> Iterator[None]:
    """End the streamer when decoding raises: its reader would wait for ever."""
    try:
        yield
    except BaseException as error:
        if streamer is not None and getattr(error, "ended", None) is not streamer:
            with suppress(Exception):
                error.ended = streamer  # type: ignore[attr-defined]
                streamer.end()
        raise


def generate(
    recycler: TokenRecycling, request: Request, streamer: Any, inputs_tensor: Tensor | None
) -> Any:
    """Serve a prepared ``generate`` call: recycled where that is possible, else as it is.

    Returns:
        What ``GenerationMixin._sample`` returns.

    Raises:
        TokenRecyclingError: the call cannot be served and the recycler is strict.
    """
    target = recycler.target
    with _ended(streamer):
        if "/" in GENERATION_MODES_MAPPING[request.mode]:
            mode = request.mode.value.replace("_", " ")
            raise TokenRecyclingError(f"{mode} lives on the hub; leave custom_generate out for it")
        if isinstance(target, TreeTarget):
            reason = target.changed() or request.obstacle(target.max_positions)
            if reason is None:
                with recycler.turns.turn(wait=recycler.queue) as mine:
                    if mine:
                        return _recycle(recycler, target, request, streamer)
                reason = "another answer of this model is not finished"
            _tell(recycler, reason)
        target.exact.refresh()
        with target.exact:
            return _stock(recycler.model, request, streamer, inputs_tensor)


def _tell(recycler: TokenRecycling, reason: str) -> None:
    """Warn once per reason, or raise."""
    message = f"this call of generate cannot be recycled: {reason}"
    if recycler.strict:
        raise TokenRecyclingError(message)
    if reason not in recycler.warned:
        recycler.warned.add(reason)
        warnings.warn(f"{message}; it is decoded plainly", PlainDecodingWarning, stacklevel=2)


def _stock(model: Any, request: Request, streamer: Any, inputs_tensor: Tensor | None) -> Any:
    """Call the decoding method that ``generate`` would have called."""
    method = getattr(type(model), GENERATION_MODES_MAPPING[request.mode])
    inputs = dict(request.inputs)
    if "inputs_tensor" in inspect.signature(method).parameters:
        inputs["inputs_tensor"] = inputs_tensor
    return method(
        model,
        request.input_ids,
        logits_processor=request.processors,
        stopping_criteria=request.criteria,
        generation_config=request.config,
        synced_gpus=request.synced_gpus,
        streamer=streamer,
        **inputs,
    )


class _Scores:
    """Raw logits and processed scores of every token of a single row, where they are asked for."""

    def __init__(self, request: Request) -> None:
        self.scores: tuple[Tensor, ...] | None = () if request.wants("output_scores") else None
        self.logits: tuple[Tensor, ...] | None = () if request.wants("output_logits") else None
        self.device = request.input_ids.device

    @property
    def wanted(self) -> bool:
        return self.scores is not None or self.logits is not None

    def keep(self, row: int, logits: Tensor, scores: Tensor) -> None:
        if self.scores is not None:
            self.scores += (scores.to(self.device),)
        if self.logits is not None:
            self.logits += (logits.to(self.device),)


class _Answer:
    """The tokens of a batch, padded and streamed as if its rows went in step."""

    def __init__(self, request: Request, streamer: Any) -> None:
        self.input_ids, self.streamer = request.input_ids, streamer
        pad = request.config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.tokens: list[list[int]] = [[] for _ in range(request.batch)]
        self.ended = [False] * request.batch
        self._streamed = 0

    def emit(self, row: int, token: int, ends: bool) -> None:
        self.tokens[row].append(token)
        self.ended[row] |= ends
        while self.streamer is not None and self._next_is_known():
            column = torch.tensor(self._column(self._streamed), device="cpu")
            self.streamer.put(column)
            self._streamed += 1

    def _next_is_known(self) -> bool:
        known = [len(tokens) > self._streamed for tokens in self.tokens]
        return any(known) and all(k or ended for k, ended in zip(known, self.ended))

    def _column(self, at: int) -> list[int]:
        return [tokens[at] if at < len(tokens) else self.pad for tokens in self.tokens]

    def sequences(self) -> Tensor:
        columns = [self._column(at) for at in range(max(map(len, self.tokens)))]
        new = torch.tensor(columns, device=self.input_ids.device).T
        return torch.cat([self.input_ids, new], dim=1)


def _recycle(
    recycler: TokenRecycling, target: TreeTarget, request: Request, streamer: Any
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode by draft trees, with everything that the call prepared."""
    config, rows = request.config, request.rows()
    kept, answer = _Scores(request), _Answer(request, streamer)
    accept: Acceptor = GreedyAcceptor()
    across = [one for one in request.criteria if request.batch > 1 and looks_at_batch(one)]
    own = [one for one in request.criteria if one not in across]
    draws = BatchDraws(request.batch, ahead=bool(across)) if config.do_sample else None
    if not request.is_plain_greedy or kept.wanted:
        accept = FollowAcceptor(
            rows,
            [request.row_processors(row) for row in range(request.batch)],
            draws,
            target.device,
            kept.keep if kept.wanted else None,
        )
    device = answer.input_ids.device
    rules = CriteriaRules(own, rows, device, lambda: kept.scores)
    pad = answer.pad if request.ends_rows else None
    columns = ColumnRules(rules, across, request.input_ids, pad, answer.emit)

    def stop(row: int, token: int) -> str | None:
        with ordinary_tensors():  # criteria and streamers are other people's code
            if across:
                return columns(row, token)
            reason = rules(row, token)
            answer.emit(row, token, reason is not None)
            return reason

    if request.cached:
        target.cache = take_in(request.cache, len(target.cache.layers), target.dtype)
    prompts = request.prompts()
    for _ in recycler.steps(prompts, accept, stop, keep=lambda: request.cached):
        pass
    if across:  # rows may have gone on behind their ends
        read = [len(prompt) + len(new) - 1 for prompt, new in zip(prompts, answer.tokens)]
        target.cache.rewind(read)
        if draws is not None:
            draws.rewind(max(map(len, answer.tokens)), target.device)
    if streamer is not None:
        streamer.end()
    cache = None
    if config.return_dict_in_generate or request.own_cache:
        cache = request.cache if request.own_cache else DynamicCache()
        read_padding(target, answer.tokens, answer.pad)
        hand_out(target.cache, cache)
    if not config.return_dict_in_generate:
        return answer.sequences()
    return GenerateDecoderOnlyOutput(
        sequences=answer.sequences(),
        scores=kept.scores,
        logits=kept.logits,
        past_key_values=cache,
    )

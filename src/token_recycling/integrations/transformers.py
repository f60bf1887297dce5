"""``enable(model)``: use Token Recycling in ``model.generate`` and everything that calls it.

And ``generate``, for a repository on the Hub and ``custom_generate="org/name"`` (folder ``hub``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from token_recycling.decoding.metrics import Stats
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.errors import TokenRecyclingError
from token_recycling.hf.serve import patch_generate, streamer_ended, unpatch_generate, warn_plain
from token_recycling.model.override import Override
from token_recycling.model.target import TreeTarget
from token_recycling.options import OptionArguments
from token_recycling.recycler import TokenRecycling

if TYPE_CHECKING:
    from typing_extensions import Unpack


def enable(model: Any, tokenizer: Any = None, **options: Unpack[OptionArguments]) -> Enabled:
    """Use Token Recycling in ``model.generate`` and everything that calls it, e.g. ``pipeline``.

    Args:
        model: a Transformers ``…ForCausalLM``, or an object around one: a pipeline, a PEFT model,
            a compiled model, … ``generate`` is overridden on this instance until ``disable``; a
            copy or a pickle of the model has the stock method.
        tokenizer: its tokenizer, for the fingerprint of a saved matrix.
        **options: see ``options.Options``. With ``strict``, a call that cannot be recycled raises
            instead of falling back to standard decoding with a ``PlainDecodingWarning``.

    Returns:
        An object with ``disable``, which is also a context manager.

    Raises:
        TokenRecyclingError: see ``TokenRecycling``.
    """
    return Enabled(TokenRecycling(model, tokenizer, **options))


class Enabled:
    """A model with an overridden ``generate``, until ``disable`` or the end of a ``with`` block."""

    def __init__(self, recycler: TokenRecycling) -> None:
        """Override ``generate`` on the recycler's model.

        Raises:
            TokenRecyclingError: someone else has already replaced ``generate`` on the model object.
        """
        self.recycler = recycler
        model = recycler.model
        before = model.__dict__.get("generate")
        if before is not None and not isinstance(before, Override) and not _is_hubs(before):
            raise TokenRecyclingError(
                "the model has its own generate; pass custom_generate=TokenRecycling(model) instead"
            )
        # If a model is enabled twice, only the later recycler serves calls.
        self._overrides = [self._cover("generate", _recycled)]
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
        """Copy together with the model, enabled if this object is."""
        return _enabled_again, (self.recycler, self._overrides[0].call is not None)

    def __repr__(self) -> str:
        """Name the recycler, and whether it is in use."""
        return f"<{'Enabled' if self._overrides[0].call else 'Disabled'}: {self.recycler!r}>"

    def disable(self) -> None:
        """Leave nothing of ours in the model; calling this again does nothing."""
        model = self.recycler.model
        self.recycler.disabled = True
        unpatch_generate(model, self.recycler)
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
        """Statistics of all answers so far, summed."""
        return self.recycler.stats

    @property
    def matrix(self) -> AdjacencyMatrix:
        """The adjacency matrix, kept across calls."""
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


def _is_hubs(present: Any) -> bool:
    """Return whether ``from_pretrained`` took ``generate`` from a repository like ours."""
    return isinstance(present, functools.partial) and present.func is generate


# Continuous batching has its own cache, scheduler and sampler, which do not support draft trees.
CONTINUOUS = ("generate_batch", "init_continuous_batching")


def _continuous(
    recycler: TokenRecycling, model: Any, stock: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    """Warn that continuous batching falls back to standard decoding, then run it."""
    warn_plain(recycler, "continuous batching has its own cache and loop")
    return stock(*args, **kw)


# Options that select decoding methods that Transformers has moved to the Hub.
HUB_METHODS = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa",
    "num_beam_groups": "group beam search",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}


def _recycled(
    recycler: TokenRecycling, model: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``generate`` with the recycler as decoding method, unless another is requested."""
    patch_generate(model, recycler)  # a copied model may not be patched yet
    given = inspect.signature(stock).bind_partial(*args, **kwargs).arguments
    if given.get("custom_generate") is not None:
        return stock(*args, **kwargs)
    with streamer_ended(given.get("streamer")):
        configs = (given.get("generation_config"), model.generation_config)
        for name, method in HUB_METHODS.items():
            values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
            if all(value in (None, 1) for value in values):
                continue
            if isinstance(recycler.target, TreeTarget):
                warn_plain(recycler, f"{method} is requested")
            return stock(*args, **kwargs)
        return stock(*args, **{**kwargs, "custom_generate": recycler})


# Attribute of a model: the options of a call of ``generate``, and the recycler made for them. It
# lives as long as the model, so that calls learn from each other.
ATTRIBUTE = "_token_recycling"


def generate(
    *args: Any, model: Any, token_recycling: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Generate with Token Recycling, like ``model.generate(*args, **kwargs)``.

    Args:
        *args: as in Transformers.
        model: a Transformers ``…ForCausalLM``.
        token_recycling: options, see ``options.Options``. Other options than those of the last
            call start with an empty matrix.
        **kwargs: as in Transformers.

    Returns:
        What the model's own ``generate`` returns.

    Raises:
        TokenRecyclingError: see ``TokenRecycling``.
    """
    options = token_recycling or {}
    cached = model.__dict__.get(ATTRIBUTE)
    if cached is None or cached[0] != options:
        cached = (options, TokenRecycling(model, **options))
        setattr(model, ATTRIBUTE, cached)
    stock = functools.partial(type(model).generate, model)
    return _recycled(cached[1], model, stock, *args, **kwargs)

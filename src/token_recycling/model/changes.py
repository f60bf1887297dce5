"""What a target was made for, and whether the model is still that."""

from __future__ import annotations

from typing import Any

import torch

from token_recycling.errors import TokenRecyclingError
from token_recycling.model.limits import (
    AttentionWindow,
    attention_windows,
    input_device,
    least,
    position_limit,
    slot_limit,
    text_config,
    vocabulary,
)
from token_recycling.model.training import is_repeatable, mode, train_time_behaviour

ATTENTION = ("eager", "sdpa")  # flash takes no 4D mask; flex crashes the process with one
# Methods used by generate that a model object, or a soft prompt, may override.
DECODING = ("_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class ModelState:
    """The properties of a model that a target relies on, as they were when it was made.

    Attributes:
        device: of the model's inputs.
        vocab_size: V.
        windows: attention windows by layer type.
        max_positions: positions that a token can have; None: no limit.
    """

    def __init__(self, model: Any) -> None:
        """Note the state of ``model``.

        Raises:
            TokenRecyclingError: trees cannot be verified in this state.
        """
        self.device: torch.device = input_device(model)
        self.vocab_size = vocabulary(model)
        self.windows, self.max_positions = _limits(model)
        self._tried: tuple[Any, ...] = ()  # training mode of ``_repeatable``
        self._repeatable = True
        if reason := self._other_model(model):
            raise TokenRecyclingError(reason)

    def changed(self, model: Any) -> str | None:
        """Return why ``model`` must not be used as it is now, or None."""
        return self._other_model(model) or self._trains(model)

    def _other_model(self, model: Any) -> str | None:
        attention = getattr(text_config(model.config), "_attn_implementation", None) or "eager"
        if attention not in ATTENTION:
            return f"{attention} attention does not accept tree masks; choose sdpa or eager"
        if self.vocab_size != vocabulary(model):
            return "the model's vocabulary has changed"
        if _limits(model) != (self.windows, self.max_positions):
            return "the model's attention windows or positions have changed"
        if self.device != input_device(model):
            return f"the model is no longer on {self.device}"
        overrides = [name for name in DECODING if name in model.__dict__]
        return f"the model object overrides {overrides[0]}" if overrides else None

    def _trains(self, model: Any) -> str | None:
        """Return how training mode would change the results, or None if it does not."""
        reason = train_time_behaviour(model)
        training = mode(model) if reason is None else ()
        if training and training != self._tried:
            with torch.no_grad():
                self._repeatable = is_repeatable(model, self.vocab_size, self.device)
            self._tried = training
        if training and not self._repeatable:
            reason = "its logits for the same text vary"
        if reason is None:
            return None
        return f"the model is in training mode and {reason}; call model.eval()"


def _limits(model: Any) -> tuple[dict[str, AttentionWindow], int | None]:
    """Return the attention windows and the position limit of the current configuration.

    Raises:
        TokenRecyclingError: a layer type or the limits do not allow trees.
    """
    config = model.config
    return attention_windows(config), least(position_limit(config), slot_limit(config))

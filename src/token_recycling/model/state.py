"""What a target reads off a model, and the states in which a model cannot verify trees."""

from __future__ import annotations

from typing import Any

import torch

from token_recycling.errors import TokenRecyclingError
from token_recycling.model.limits import (
    attention_windows,
    context_limit,
    input_device,
    least,
    position_limit,
    slot_limit,
    text_config,
    vocabulary,
)
from token_recycling.model.training import is_repeatable, train_time_behaviour

ATTENTION = ("eager", "sdpa")  # flash takes no 4D mask; flex crashes the process with one
# Methods used by generate that a model object, or a soft prompt, may override.
DECODING = ("_sample", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


class ModelState:
    """The properties of a model that a target relies on.

    Attributes:
        device: of the model's inputs.
        vocab_size: V.
        windows: attention windows by layer type.
        max_positions: positions that a token can have; None: no limit.
        max_context: most tokens of a text; None: no limit.
    """

    def __init__(self, model: Any) -> None:
        """Read the state of ``model``.

        Raises:
            TokenRecyclingError: trees cannot be verified in this state.
        """
        config = model.config
        self.device: torch.device = input_device(model)
        self.vocab_size = vocabulary(model)
        attention = getattr(text_config(config), "_attn_implementation", None) or "eager"
        if attention not in ATTENTION:
            raise TokenRecyclingError(
                f"{attention} attention does not accept tree masks; choose sdpa or eager"
            )
        self.windows = attention_windows(config)
        self.max_positions = least(position_limit(config), slot_limit(config))
        self.max_context = least(context_limit(config), slot_limit(config))
        for name in DECODING:
            if name in model.__dict__:
                raise TokenRecyclingError(f"the model object overrides {name}")


def while_training(model: Any, state: ModelState) -> str | None:
    """Return how training mode changes the results, or None if it does not."""
    reason = train_time_behaviour(model)
    if reason is None and any(module.training for module in model.modules()):
        with torch.no_grad():
            if not is_repeatable(model, state.vocab_size, state.device):
                reason = "its logits for the same text vary"
    if reason is None:
        return None
    return f"the model is in training mode and {reason}; call model.eval()"

"""Checks whether training mode changes what a model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

ROUNDING = 1e-3  # in standard deviations of the logits; a dropout of 0.001 exceeds it
TOKENS = 8  # length of the texts compared


def _is_rate(name: str, value: object) -> bool:
    """Return whether an attribute is a positive dropout or jitter rate."""
    named = any(part in name for part in ("drop", "jitter")) and not name.startswith(
        ("summary", "classifier")  # heads that do not generate text
    )
    return named and isinstance(value, float) and value > 0


def train_time_behaviour(model: Any) -> str | None:
    """Return why ``model``, with modules in training mode, differs from evaluation mode.

    Returns:
        A reason, or None if dropouts are 0 and nothing else known depends on the mode.
    """
    training = [module for module in model.modules() if module.training]
    if not training:
        return None
    for module in training:
        if isinstance(module, _DropoutNd) and module.p > 0:
            return f"a dropout of {module.p:g} is active"
        if isinstance(module, _BatchNorm):
            return "its batch normalisation updates its statistics"
        if getattr(module, "gradient_checkpointing", False):
            return "gradient checkpointing disables its cache"
        for name, value in vars(module).items():
            if _is_rate(name, value):
                return f"its {name} is {value:g}"
    for name, value in model.config.get_text_config(decoder=True).to_dict().items():
        if _is_rate(name, value):
            return f"its {name} is {value:g}"
    return None


def is_repeatable(model: nn.Module, vocab_size: int, device: torch.device) -> bool:
    """Return whether ``model`` computes a text the same twice, and in a batch with another text.

    Randomness and operations over the whole batch make the results differ.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab_size, (2, TOKENS), generator=rng, device="cpu").to(device)
        logits = []
        for seed, rows in enumerate((ids[:1], ids[:1], ids)):
            torch.manual_seed(seed)
            output = model(input_ids=rows, use_cache=False, return_dict=True)
            logits.append(output.logits[0].float().nan_to_num(0.0, 0.0, 0.0))
    once, *others = logits  # values that are not finite were zeroed, so they are not compared
    bound = ROUNDING * float(once.std())
    return all(float((once - other).abs().max()) <= bound for other in others)

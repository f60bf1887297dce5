"""What a model in training mode computes otherwise than in evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

ROUNDING = 1e-3  # of the logits' deviation; a dropout of one in a thousand makes more
TOKENS = 8  # of the texts that are compared


def _is_rate(name: str, value: object) -> bool:
    """True for a number above 0 that says how much is dropped, or shaken."""
    named = any(part in name for part in ("drop", "jitter")) and not name.startswith(
        ("summary", "classifier")  # of heads that write no text
    )
    return named and isinstance(value, float) and value > 0


def train_time_behaviour(model: Any) -> str | None:
    """Name what makes ``model``, with modules in training mode, differ from itself in evaluation.

    Returns:
        A reason, or None: dropouts are 0 and nothing else is known to look at the mode.
    """
    training = [module for module in model.modules() if module.training]
    if not training:
        return None
    for module in training:
        if isinstance(module, _DropoutNd) and module.p > 0:
            return f"a dropout of {module.p:g} is active"
        if isinstance(module, _BatchNorm):
            return "its batch normalisation learns"
        if getattr(module, "gradient_checkpointing", False):
            return "gradient checkpointing switches its cache off"
        for name, value in vars(module).items():
            if _is_rate(name, value):
                return f"its {name} is {value:g}"
    for name, value in model.config.get_text_config(decoder=True).to_dict().items():
        if _is_rate(name, value):
            return f"its {name} is {value:g}"
    return None


def mode(model: nn.Module) -> tuple[Any, ...]:
    """Return what decides how a model with modules in training mode computes; () without any."""
    modules = list(model.modules())
    if not any(module.training for module in modules):
        return ()
    return tuple(
        (
            id(module),
            module.training,
            tuple(module._forward_hooks),
            tuple(module._forward_pre_hooks),
            id(module.__dict__.get("forward")),
        )
        for module in modules
    )


def is_repeatable(model: nn.Module, vocab_size: int, device: torch.device) -> bool:
    """True when ``model``, in the mode it is in, computes a text alike twice, and beside another.

    What is random or looks at the whole batch differs.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab_size, (2, TOKENS), generator=rng).to(device)
        found = []
        for seed, rows in enumerate((ids[:1], ids[:1], ids)):
            torch.manual_seed(seed)
            output = model(input_ids=rows, use_cache=False, return_dict=True)
            found.append(output.logits[0].float().nan_to_num(0.0, 0.0, 0.0))
    once, *others = found  # what is not finite is not compared
    bound = ROUNDING * float(once.std())
    return all(float((once - other).abs().max()) <= bound for other in others)

"""Find the model inside a pipeline, a wrapper or a compiled model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import GenerationMixin

from token_recycling.errors import TokenRecyclingError

# Attributes with the wrapped model: torch.compile, distributed wrappers, pipelines and evaluation
# harnesses.
ATTRIBUTES = ("_orig_mod", "module", "model")
DEEPEST = 4  # maximum nesting of wrappers


def model_inside(given: Any) -> Any:
    """Return the Transformers model that ``given`` is or wraps.

    Raises:
        TokenRecyclingError: there is none, or it is ambiguous; the message says what to pass.
    """
    if isinstance(given, str | Path):
        raise TokenRecyclingError(
            f"{str(given)!r} is not a model object; load it with "
            "AutoModelForCausalLM.from_pretrained, or use TokenRecycling.from_pretrained"
        )
    model = given
    for _ in range(DEEPEST):
        if isinstance(model, GenerationMixin):
            return model
        inner = _inside(model)
        if inner is None:
            break
        model = inner
    kind = type(given).__name__
    names = [name for name, value in _attributes(given) if isinstance(value, GenerationMixin)]
    if names:
        choices = " or ".join(f".{name}" for name in sorted(names))
        raise TokenRecyclingError(f"{kind} is not a Transformers model; pass its {choices}")
    raise TokenRecyclingError(
        f"{kind} is not a Transformers model that generates text; pass a …ForCausalLM"
    )


def _inside(wrapper: Any) -> Any:
    with suppress(Exception):  # attribute access may run arbitrary code
        base = getattr(wrapper, "get_base_model", None)  # peft's
        if callable(base):
            return base()
    for name in ATTRIBUTES:
        inner = None
        with suppress(Exception):
            inner = getattr(wrapper, name, None)
        if inner is not None and inner is not wrapper and not isinstance(inner, str):
            return inner
    return None


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    attributes = dict(getattr(thing, "__dict__", {}))
    attributes.update(attributes.pop("_modules", None) or {})
    return list(attributes.items())

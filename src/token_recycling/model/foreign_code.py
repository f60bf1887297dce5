"""Whose code a model runs: functions of unknown code, and where they stand in a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

OURS = ("token_recycling", "skinny_kernels")
# Whose forwards and hooks may be on single modules: they place and convert tensors, and treat all
# positions of a forward alike.
FORWARDS = (*OURS, "accelerate", "kernels", "transformers")
HOOKS = (*OURS, "accelerate", "peft", "transformers", "torch.nn.utils")
LIBRARIES = ("torch", "transformers", "accelerate", "peft", *OURS)  # whose code does not change
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
NESTED = 4  # levels of partials and bound methods that are followed


def belongs(name: str, packages: Iterable[str]) -> bool:
    """Return whether a Python module is one of the packages or inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def function_of(call: Any) -> Any:
    """Return the function that a partial or a bound method calls."""
    for _ in range(NESTED):
        call = getattr(call, "func", getattr(call, "__func__", call))
    return call


def home(call: Any) -> str:
    """Return the name of the Python module whose code ``call`` runs; a wrapper's is its own."""
    function = function_of(call)
    names = getattr(function, "__globals__", None)
    if names is not None:
        return str(names.get("__name__", ""))
    return str(type(function).__module__)


def title(call: Any) -> str:
    """Return the name of a function or of an object's class."""
    function = function_of(call)
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    return name.rpartition("<locals>.")[2]


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with names as a user would write them, the model's own first."""
    for name, module in model.named_modules():
        yield (f"model.{name}" if name else "model"), module


def foreign_code(model: nn.Module) -> str | None:
    """Return which hook or replaced forward may treat the tokens of a forward differently, or None.

    Such code may look at positions or at variables, differently each time. What is known to treat
    all positions alike is in ``FORWARDS`` and ``HOOKS``.
    """
    for part in GLOBAL_HOOKS:
        for hook in getattr(torch_module, part).values():
            if not belongs(home(hook), HOOKS):
                return f"there is a hook for all modules ({title(hook)})"
    classes: dict[type, bool] = {}
    for name, module in named_modules(model):
        own = module.__dict__
        for part in ("_forward_hooks", "_forward_pre_hooks"):
            for hook in own[part].values():
                if not belongs(home(hook), HOOKS):
                    return f"{name} has a hook ({title(hook)})"
        cls = type(module)
        forward = own.get("forward")
        trusted = _is_own_method(forward, module) or belongs(home(forward), FORWARDS)
        if forward is not None and not trusted:
            return f"the forward of {name} was replaced"
        if cls not in classes:
            packages = {base.__module__.partition(".")[0] for base in cls.__mro__}
            place = home(cls.forward)
            classes[cls] = "_dynamo" not in place and place.partition(".")[0] in packages
        if not classes[cls]:
            return f"the forward of the class {cls.__name__} was replaced"
    return None


def _is_own_method(forward: Any, module: nn.Module) -> bool:
    return (
        isinstance(forward, MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )

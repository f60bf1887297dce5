"""The shadow of a model: modules of our own with the model's weights, for our forwards alone.

Kernels replace the ``forward`` of single modules. If they did so in the model itself, everybody who
looks at it, compiles, copies, prunes or trains it would meet them. The modules of a shadow share
the memory of the model's tensors and nothing else. So the model stays as its owner made it, and
whatever its owner does meanwhile, an answer is that of the model as it was when it began, but for
weights that are written in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

from skinny_kernels.modes import ordinary_tensors

BOUND = "_skinny_kernels_bound"  # attribute with the first arguments of a module's ``call``


def shadow_of(
    model: nn.Module, configs: dict[int, Any] | None = None, **attributes: Any
) -> nn.Module:
    """Return the shadow of ``model``.

    A ``forward`` on a single module, as accelerate makes it, calls that module and those inside it.

    Args:
        model: the model.
        configs: configurations that its modules have instead of others, by the ids of these.
        **attributes: of all modules, instead of their own.
    """
    modules = {id(module): _copied(module, configs or {}, attributes) for module in model.modules()}
    aliases: dict[int, Tensor] = {}  # tied weights stay tied
    for module in modules.values():
        for part in ("_parameters", "_buffers"):
            tensors = module.__dict__[part]
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in aliases:
                        aliases[id(tensor)] = _alias(tensor)
                    tensors[name] = aliases[id(tensor)]
    for module in modules.values():
        children = module.__dict__["_modules"]
        for name, child in children.items():
            children[name] = None if child is None else modules[id(child)]
    return modules[id(model)]


def _copied(module: nn.Module, configs: dict[int, Any], attributes: dict[str, Any]) -> nn.Module:
    shadow = type(module).__new__(type(module))
    for name, value in vars(module).items():
        value = configs.get(id(value), value)
        # What a forward assigns to its module stays in the shadow.
        shadow.__dict__[name] = value.copy() if isinstance(value, dict) else value
    shadow.__dict__.update(attributes)
    return shadow


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory, which ``tensor.data = …`` does not take away."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_inference():
        return tensor  # subclasses and inference tensors cannot be aliased
    with ordinary_tensors():
        alias = tensor.detach()
        return nn.Parameter(alias, requires_grad=False) if type(tensor) is nn.Parameter else alias


def stock_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of the module that this one is a shadow of."""
    cls: type[nn.Module] = getattr(type(module), "stock_class", type(module))
    return cls


def replacement(module: nn.Module) -> Callable[..., Any] | None:
    """Return what ``replace_forward`` has put in place of a shadow's ``forward``, or None."""
    call: Callable[..., Any] | None = getattr(type(module), "replacement", None)
    return call


def replace_forward(module: nn.Module, call: Callable[..., Any], *bound: Any) -> None:
    """Let a shadow compute ``call(*bound, module, stock, …)``; ``stock`` is its class's forward.

    The class of the object is changed, because a function in its ``__dict__`` would refer to the
    object, and keep its weights until the garbage collector runs. Another's ``forward`` stays.
    """
    if "forward" not in vars(module):
        cls = stock_class(module)
        module.__class__ = _subclass(cls, cls.forward, call)  # type: ignore[arg-type]
        module.__dict__[BOUND] = bound


@lru_cache(None)
def _subclass(
    cls: type[nn.Module], stock: Callable[..., Any], call: Callable[..., Any]
) -> type[nn.Module]:
    signature = inspect.signature(stock)
    kinds = {parameter.kind for parameter in inspect.signature(call).parameters.values()}
    takes_names = inspect.Parameter.VAR_KEYWORD in kinds

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs and not takes_names:  # ``call`` names its parameters otherwise
            args, kwargs = signature.bind(self, *args, **kwargs).args[1:], {}
        return call(*self.__dict__[BOUND], self, partial(stock, self), *args, **kwargs)

    names = {"forward": forward, "stock_class": cls, "replacement": staticmethod(call)}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **names})


def replace_globals(module: nn.Module, names: dict[str, Any]) -> None:
    """Let the forward of a shadow see other values of these global names, where it uses them."""
    cls = stock_class(module)
    forward = with_globals(cls.forward, names) if names else None
    if forward is not None and "forward" not in vars(module):
        body = {"__module__": cls.__module__, "forward": forward, "stock_class": cls}
        module.__class__ = type(cls.__name__, (cls,), body)


def with_globals(function: Any, names: dict[str, Any]) -> Any:
    """Return a function that sees other values of these global names.

    If a decorated one does not use them, the functions that it closes over are looked at.

    Returns:
        None if none of the names are used.
    """
    if not isinstance(function, FunctionType):
        return None
    visible, closure = function.__globals__, function.__closure__
    if names.keys() & set(function.__code__.co_names):
        visible = {**visible, **names}
    else:
        inner = [with_globals(cell.cell_contents, names) for cell in closure or ()]
        if not any(inner):
            return None
        pairs = zip(closure or (), inner)
        closure = tuple(cell if other is None else CellType(other) for cell, other in pairs)
    twin = FunctionType(
        function.__code__, visible, function.__name__, function.__defaults__, closure
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin

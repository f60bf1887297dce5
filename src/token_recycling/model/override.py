"""Override a method on a single object."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakSet


def _takes_names(call: Callable[..., Any]) -> bool:
    """Return whether a function takes any keyword argument."""
    kinds = (parameter.kind for parameter in inspect.signature(call).parameters.values())
    return inspect.Parameter.VAR_KEYWORD in kinds


def _without(owner: Any, name: str) -> Any:
    """Return an object of the same class and attributes but one, and the same modules and weights.

    It serves a method that somebody has kept after its owner has gone.
    """
    twin = object.__new__(type(owner))
    vars(twin).update({key: value for key, value in vars(owner).items() if key != name})
    return twin


class Override:
    """A callable in an object's ``__dict__`` that overrides a method of its class.

    In a copy or a pickle of the object, it calls the class's method. To whoever inspects it, it is
    that method: ``torch.jit.script`` and ``torch.export`` compile its ``__func__``.

    Attributes:
        call: called with the object, its class's method bound to it, and the arguments; None: call
            that method.
        before: the previous value in ``__dict__``, or None.
        users: those for whom it is there; None: it has one owner, who removes it.
    """

    users: WeakSet[Any] | None = None

    def __init__(
        self, owner: Any, name: str, call: Callable[..., Any] | None, before: Any = None
    ) -> None:
        """Create an override for ``owner``, to be assigned by the caller."""
        self._owner = weakref.ref(owner)  # a reference cycle would keep the owner alive
        self._owned = type(owner)
        self._twin = _without(owner, name) if vars(owner) else None  # None: a copy being made
        self.call, self.before = call, before
        self._takes_names = call is None or _takes_names(call)
        self.__name__, self.__doc__ = name, getattr(type(owner), name).__doc__
        self.__signature__ = inspect.signature(getattr(type(owner), name).__get__(owner))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What ``isinstance`` and ``inspect`` believe."""
        return MethodType

    @property
    def __func__(self) -> Any:
        """Return the class's function."""
        return getattr(self._owned, self.__name__)

    def _object(self) -> Any:
        """Return the object.

        Raises:
            ReferenceError: it is gone.
        """
        owner = self._owner()
        if owner is None:
            owner = self._twin
        if owner is None:
            raise ReferenceError(f"the {self._owned.__name__} of this {self.__name__} is gone")
        return owner

    __self__ = property(_object)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the class's function."""
        if name in ("_owned", "__name__"):  # of an object that is being made
            raise AttributeError(name)
        return getattr(self.__func__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``call``, or the class's method if that is None."""
        owner = self._object()
        # Not as a method, whose making PyTorch 2.11 cannot trace
        stock = partial(getattr(self._owned, self.__name__), owner)
        if self.call is None:
            return stock(*args, **kwargs)
        if kwargs and not self._takes_names:  # ``call`` names its parameters otherwise
            args, kwargs = self.__signature__.bind(*args, **kwargs).args, {}
        return self.call(owner, stock, *args, **kwargs)

    def __reduce__(self) -> Any:
        return Override, (self._owner(), self.__name__, None)

    def covers(self, owner: Any) -> bool:
        """Return whether this overrides ``owner``, not a copy of it."""
        return self.call is not None and self._owner() is owner


def is_covered(owner: Any, name: str) -> bool:
    """Return whether an ``Override`` covers ``name`` of this object (see ``Override.covers``)."""
    present = owner.__dict__.get(name)
    return isinstance(present, Override) and present.covers(owner)

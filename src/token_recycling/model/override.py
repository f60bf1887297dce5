"""Override a method on a single object."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any


def _takes_names(call: Callable[..., Any]) -> bool:
    """Return whether a function takes any keyword argument."""
    kinds = (one.kind for one in inspect.signature(call).parameters.values())
    return inspect.Parameter.VAR_KEYWORD in kinds


class Override:
    """A callable in an object's ``__dict__`` that overrides a method of its class.

    In a copy or a pickle of the object, it calls the class's method.

    Attributes:
        call: called with the object, its class's method bound to it, and the arguments; None: call
            that method.
        before: the previous value in ``__dict__``, or None.
    """

    def __init__(
        self, owner: Any, name: str, call: Callable[..., Any] | None, before: Any = None
    ) -> None:
        """Create an override for ``owner``, to be assigned by the caller."""
        self._owner = weakref.ref(owner)  # a reference cycle would keep the owner alive
        self.call, self.before = call, before
        self._takes_names = call is None or _takes_names(call)
        self.__name__, self.__doc__ = name, getattr(type(owner), name).__doc__
        self.__signature__ = inspect.signature(getattr(type(owner), name).__get__(owner))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``call``, or the class's method if that is None."""
        owner = self._owner()
        # Not as a method, whose making PyTorch 2.11 cannot trace
        stock = partial(getattr(type(owner), self.__name__), owner)
        if self.call is None:
            return stock(*args, **kwargs)
        if kwargs and not self._takes_names:  # ``call`` names its parameters otherwise
            args, kwargs = self.__signature__.bind(*args, **kwargs).args, {}
        return self.call(owner, stock, *args, **kwargs)

    def __reduce__(self) -> Any:
        return Override, (self._owner(), self.__name__, None)

    def covers(self, owner: Any, call: Callable[..., Any] | None = None) -> bool:
        """Return whether this overrides ``owner``, not a copy of it, with ``call`` if given."""
        own = getattr(self.call, "func", self.call)  # the function inside a partial
        return own is not None and self._owner() is owner and call in (None, own)


def is_covered(owner: Any, name: str, call: Callable[..., Any] | None = None) -> bool:
    """Return whether an ``Override`` covers ``name`` of this object (see ``Override.covers``)."""
    present = owner.__dict__.get(name)
    return isinstance(present, Override) and present.covers(owner, call)


def replaceable(owner: Any, name: str = "forward") -> bool:
    """Return whether the method can be overridden without losing someone's replacement."""
    present = owner.__dict__.get(name)
    return present is None or (isinstance(present, Override) and not is_covered(owner, name))

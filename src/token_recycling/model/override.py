"""A method of one object, in place of its class's."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any


class Override:
    """What stands in an object's ``__dict__`` in front of a method of its class.

    A copy or a pickle of the object has the method of its class there.

    Attributes:
        call: gets the class's method, bound, and the arguments; None: that method alone.
        before: what was there earlier.
    """

    def __init__(
        self, owner: Any, name: str, call: Callable[..., Any] | None, before: Any = None
    ) -> None:
        """Make one for ``owner``; the caller puts it there."""
        self._owner = weakref.ref(owner)  # a cycle would keep the owner's memory
        self.call, self.before = call, before
        self.__name__, self.__doc__ = name, getattr(type(owner), name).__doc__
        self.__signature__ = inspect.signature(getattr(type(owner), name).__get__(owner))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``call``, or the class's method."""
        owner = self._owner()
        stock = getattr(type(owner), self.__name__).__get__(owner)
        return stock(*args, **kwargs) if self.call is None else self.call(stock, *args, **kwargs)

    def __reduce__(self) -> Any:
        return Override, (self._owner(), self.__name__, None)

    def covers(self, owner: Any, call: Callable[..., Any] | None = None) -> bool:
        """True when this stands for ``owner`` (False for a copy), and calls ``call``, if given."""
        own = getattr(self.call, "func", self.call)  # of a partial, what it calls
        return own is not None and self._owner() is owner and call in (None, own)


def is_covered(owner: Any, name: str, call: Callable[..., Any] | None = None) -> bool:
    """True where an ``Override`` stands for this very object's method (see ``covers``)."""
    present = owner.__dict__.get(name)
    return isinstance(present, Override) and present.covers(owner, call)


def replaceable(owner: Any, name: str = "forward") -> bool:
    """True where the method is still the class's: nobody's replacement is to be lost."""
    present = owner.__dict__.get(name)
    return present is None or (isinstance(present, Override) and not is_covered(owner, name))

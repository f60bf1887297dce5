"""A fair lock that never blocks its owning thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet


class FairLock:
    """A lock that waiting threads acquire in first-come, first-served order.

    ``threading.Lock`` guarantees no order, so one busy thread may starve the others. A forked
    process has none of the threads that could own its locks, so there all of them are unlocked.
    """

    def __init__(self) -> None:
        """Create an unlocked lock."""
        _locks.add(self)
        self._unlock()

    def _unlock(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None  # thread ident
        self._waiting: deque[tuple[int, threading.Event]] = deque()

    def __reduce__(self) -> tuple[type[FairLock], tuple[()]]:
        return FairLock, ()

    @contextmanager
    def acquired(self, *, wait: bool) -> Iterator[bool]:
        """Yield True with the lock acquired; release it at the end of the block.

        Yield False if this thread owns the lock already (waiting would deadlock), or if another
        thread owns it and ``wait`` is False.
        """
        if not self._take(wait):
            yield False
            return
        try:
            yield True
        finally:
            with self._mutex:
                self._pass_on()

    def _take(self, wait: bool) -> bool:
        me = threading.get_ident()
        with self._mutex:
            if self._owner is None:
                self._owner = me
                return True
            if self._owner == me or not wait:
                return False
            called = threading.Event()
            self._waiting.append((me, called))
        try:
            called.wait()
        except BaseException:  # raised by a signal handler while waiting
            with self._mutex:
                if called.is_set():
                    self._pass_on()
                else:
                    self._waiting.remove((me, called))
            raise
        return True

    def _pass_on(self) -> None:
        self._owner = None
        if self._waiting:
            self._owner, called = self._waiting.popleft()
            called.set()


_locks: WeakSet[FairLock] = WeakSet()


def _unlock_all() -> None:
    for lock in _locks:
        lock._unlock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_unlock_all)

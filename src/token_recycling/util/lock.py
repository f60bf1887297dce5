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
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()  # idents of threads: the owner, then those that wait

    def __reduce__(self) -> tuple[type[FairLock], tuple[()]]:
        return FairLock, ()

    @contextmanager
    def acquired(self, *, wait: bool) -> Iterator[bool]:
        """Yield True with the lock acquired; release it at the end of the block.

        Yield False if this thread owns the lock already (waiting would deadlock), or if another
        thread owns it and ``wait`` is False.
        """
        me = threading.get_ident()
        with self._changed:
            refused = bool(self._queue) and (not wait or self._queue[0] == me)
            if not refused:
                self._queue.append(me)
        if refused:
            yield False
            return
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._queue[0] == me)
            yield True
        finally:  # also if a signal handler has raised while this thread waited
            with self._changed:
                if me in self._queue:  # not in a process that was forked inside the block
                    self._queue.remove(me)
                self._changed.notify_all()


_locks: WeakSet[FairLock] = WeakSet()


def _unlock_all() -> None:
    for lock in _locks:
        lock._unlock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_unlock_all)

"""A fair lock that does not block the thread that owns it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class FairLock:
    """A lock that waiting threads get in the order in which they asked.

    ``threading.Lock`` promises no order, so one busy thread may starve the others.
    """

    def __init__(self) -> None:
        """Begin without an owner."""
        self._mutex = threading.Lock()
        self._owner: int | None = None  # ident of a thread
        self._waiting: deque[tuple[int, threading.Event]] = deque()

    def __reduce__(self) -> tuple[type[FairLock], tuple[()]]:
        return FairLock, ()

    @contextmanager
    def acquired(self, *, wait: bool) -> Iterator[bool]:
        """Yield True with the lock, which is released at the end of the block.

        Yield False when another thread has it and ``wait`` is False, and when this thread has it
        already: it would wait for itself.
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
        except BaseException:  # a signal's exception, while waiting
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

"""A queue that serves its callers in turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items wait per caller; the callers are served in turn, each first come, first served."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._waiting.values() for item in items)

    def put(self, caller: str, item: T) -> None:
        """Append an item of ``caller``."""
        self._waiting.setdefault(caller, deque()).append(item)

    def next(self) -> T | None:
        """Return the item that ``pop`` would return, or None."""
        return next(iter(self), None)

    def pop(self) -> T:
        """Remove and return the next item; its caller goes to the end of the turn.

        Raises:
            KeyError: the queue is empty.
        """
        caller, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[caller] = items
        return item

    def make_room(self, caller: str, items: int, places: int) -> list[T] | None:
        """Remove the newest items of callers that would still have as many as ``caller`` gets.

        Args:
            caller: is about to put ``items`` items into a full queue.
            items: their number.
            places: how many items must go.

        Returns:
            The removed items; None, and nothing is removed, if there are not enough.
        """
        counts = {name: len(waiting) for name, waiting in self._waiting.items() if name != caller}
        least = len(self._waiting.get(caller, ())) + items
        givers: list[str] = []
        for _ in range(places):
            busiest = max(counts, key=lambda name: counts[name], default=None)
            if busiest is None or counts[busiest] <= least:
                return None
            counts[busiest] -= 1
            givers.append(busiest)
        removed = [self._waiting[name].pop() for name in givers]
        for name in set(givers):
            if not self._waiting[name]:
                del self._waiting[name]
        return removed

    def remove(self, item: T) -> bool:
        """Remove ``item``; return False if it is not waiting."""
        for caller, items in self._waiting.items():
            if item in items:
                items.remove(item)
                if not items:
                    del self._waiting[caller]
                return True
        return False

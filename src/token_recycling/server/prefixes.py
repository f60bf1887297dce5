"""Keys and values of the last conversations, so that a next turn reads only what is new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from token_recycling.model.kv_cache import RecyclingCache


@dataclass(frozen=True)
class _CachedPrefix:
    """A text that has been read.

    Attributes:
        tokens: the tokens.
        cache: their keys and values, a single row.
    """

    tokens: list[int]
    cache: RecyclingCache


class PrefixCaches:
    """The caches of the last texts, of every owner's own; the least recently used go first.

    Attributes:
        limit: most bytes; 0: nothing is kept, and no context is used again.
        nbytes: bytes in use.
    """

    def __init__(self, limit: int) -> None:
        """Keep at most ``limit`` bytes."""
        self.limit, self.nbytes = limit, 0
        self._entries: OrderedDict[int, tuple[str, _CachedPrefix]] = OrderedDict()
        self._last_key = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, owner: str, tokens: list[int]) -> tuple[int, int]:
        """Find the kept text of ``owner`` that has the longest beginning in common with ``tokens``.

        Returns:
            Its key, for ``take``, and the number of tokens; 0 tokens if there is none.
        """
        best, longest = 0, 0
        for key, (name, context) in self._entries.items():
            if name == owner and (same := common(context.tokens, tokens)) > longest:
                best, longest = key, same
        return best, longest

    def take(self, key: int, length: int) -> RecyclingCache:
        """Return a cache with the first ``length`` tokens of the text that ``find`` has found.

        A text that is needed whole is not kept any longer, which saves a copy: the row that
        continues it is kept in its place later.
        """
        _, context = self._entries[key]
        if length == len(context.tokens):
            self._drop(key)
            return context.cache
        self._entries.move_to_end(key)
        return context.cache.copy(0, length)

    def keep(self, owner: str, tokens: list[int], cache: RecyclingCache) -> None:
        """Keep a text, in place of texts of the same owner that are its beginning."""
        size = cache.nbytes
        if size > self.limit:
            return
        for key, (name, context) in list(self._entries.items()):
            if name == owner and common(context.tokens, tokens) == len(context.tokens):
                self._drop(key)
        while self.nbytes + size > self.limit:
            self._drop(next(iter(self._entries)))
        self._last_key += 1
        self._entries[self._last_key] = (owner, _CachedPrefix(tokens, cache))
        self.nbytes += size

    def _drop(self, key: int) -> None:
        self.nbytes -= self._entries.pop(key)[1].cache.nbytes


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))

"""Keys and values of the last conversations, so that a next turn reads only what is new."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.util.tokens import common


class _CachedPrefix(NamedTuple):
    """A text that has been read.

    Attributes:
        owner: whose it is.
        tokens: the tokens.
        cache: their keys and values, a single row.
    """

    owner: str
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
        self._entries: OrderedDict[int, _CachedPrefix] = OrderedDict()
        self._last_key = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, owner: str, tokens: list[int]) -> tuple[int, int]:
        """Find the kept text of ``owner`` that has the longest beginning in common with ``tokens``.

        Returns:
            Its key, for ``take``, and the number of tokens; 0 tokens if there is none.
        """
        best, longest = 0, 0
        for key, prefix in self._entries.items():
            if prefix.owner == owner and (same := common(prefix.tokens, tokens)) > longest:
                best, longest = key, same
        return best, longest

    def take(self, key: int, length: int) -> RecyclingCache:
        """Return a cache with the first ``length`` tokens of the text that ``find`` has found.

        A text that is needed whole is not kept any longer, which saves a copy: the row that
        continues it is kept in its place later.
        """
        prefix = self._entries[key]
        if length == len(prefix.tokens):
            self._drop(key)
            return prefix.cache
        self._entries.move_to_end(key)
        return prefix.cache.copy(0, length)

    def keep(self, owner: str, tokens: list[int], cache: RecyclingCache) -> None:
        """Keep a text, in place of texts of the same owner that are its beginning."""
        size = cache.nbytes
        if size > self.limit:
            return
        for key, prefix in list(self._entries.items()):
            if prefix.owner == owner and common(prefix.tokens, tokens) == len(prefix.tokens):
                self._drop(key)
        while self.nbytes + size > self.limit:
            self._drop(next(iter(self._entries)))
        self._last_key += 1
        self._entries[self._last_key] = _CachedPrefix(owner, tokens, cache)
        self.nbytes += size

    def clear(self) -> None:
        """Keep nothing: another model would continue differently."""
        self._entries.clear()
        self.nbytes = 0

    def _drop(self, key: int) -> None:
        self.nbytes -= self._entries.pop(key).cache.nbytes

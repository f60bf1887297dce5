"""Keys and values of the last conversations, so that a next turn reads only what is new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from token_recycling.model.kv_cache import RecyclingCache


@dataclass(frozen=True)
class Context:
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
        nbytes: bytes in use.
    """

    def __init__(self, limit: int) -> None:
        """Keep at most ``limit`` bytes; 0: nothing."""
        self._limit, self.nbytes = limit, 0
        self._kept: OrderedDict[int, tuple[str, Context]] = OrderedDict()
        self._made = 0

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, owner: str, tokens: list[int]) -> RecyclingCache | None:
        """Return a copy of the longest beginning of ``tokens`` that ``owner`` has kept, or None.

        Args:
            owner: who may know of the text.
            tokens: of which at least the last is not looked for, since it must be read.
        """
        best, longest = None, 0
        for key, (own, context) in self._kept.items():
            if own == owner:
                same = min(_common(context.tokens, tokens), len(tokens) - 1)
                if same > longest:
                    best, longest = key, same
        if best is None:
            return None
        self._kept.move_to_end(best)
        return RecyclingCache.of_rows([(self._kept[best][1].cache, [0])], slots=longest)

    def keep(self, owner: str, tokens: list[int], cache: RecyclingCache) -> None:
        """Keep a text, in place of texts of the same owner that are its beginning."""
        size = cache.nbytes
        if size > self._limit:
            return
        for key, (own, context) in list(self._kept.items()):
            if own == owner and _common(context.tokens, tokens) == len(context.tokens):
                self._drop(key)
        while self.nbytes + size > self._limit:
            self._drop(next(iter(self._kept)))
        self._made += 1
        self._kept[self._made] = (owner, Context(tokens, cache))
        self.nbytes += size

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.nbytes = 0

    def _drop(self, key: int) -> None:
        self.nbytes -= self._kept.pop(key)[1].cache.nbytes


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that two texts have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))

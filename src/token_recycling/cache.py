"""A preallocated KV cache on Transformers' cache API, committed in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from token_recycling import defaults


class PreallocatedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [B, heads, capacity, size], full length whatever its window.

    ``update`` writes behind the committed entries and commits nothing: what a later ``commit``
    of the cache does not keep is overwritten by the next forward.
    """

    is_sliding = False

    def __init__(self, cache: RecyclingCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shapes, dtype and device from the first states seen."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.keys = key_states.new_zeros(*key_states.shape[:2], 0, key_states.shape[-1])
        self.values = value_states.new_zeros(*value_states.shape[:2], 0, value_states.shape[-1])
        self.is_initialized = True

    def _reserve(self, slots: int) -> None:
        """Make room for ``slots`` entries; growth by a quarter keeps the copying linear."""
        capacity = self.keys.shape[2]
        if slots <= capacity:
            return
        grown = max(slots, capacity + max(defaults.CACHE_CHUNK, capacity // 4))
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            # Zeros, not garbage: a masked entry still meets a zero weight, and 0 · NaN is NaN.
            new = old.new_zeros(*old.shape[:2], grown, old.shape[-1])
            new[:, :, :capacity] = old
            setattr(self, name, new)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states of one forward; return all entries up to and including them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.cache.end
        end = begin + key_states.shape[2]
        self._reserve(end)
        self.keys[:, :, begin:end] = key_states
        self.values[:, :, begin:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Entries before the current forward."""
        return self.cache.end

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of the keys of a forward; older versions pass a tensor."""
        queries = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.cache.end + queries, 0

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    get_max_cache_shape = get_max_length  # its name before Transformers 5.20


class RecyclingCache(Cache):  # type: ignore[misc]
    """The KV cache of B rows.

    Row b's committed entries are slots 0 … ``lengths[b]``-1, so a committed entry's slot is its
    position. A forward writes its entries of every row from slot ``end`` on.
    """

    def __init__(self, layers: int, batch: int) -> None:
        super().__init__(layers=[PreallocatedLayer(self) for _ in range(layers)])
        self.lengths = [0] * batch

    @property
    def end(self) -> int:
        """First slot behind every row's committed entries."""
        return max(self.lengths)

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Keep the entries of the last forward that lie on the accepted paths.

        Args:
            path: int64 [B, p]; ``path[b, :counts[b]]`` are the nodes to keep, in order.
            counts: nodes to keep per row, 0 … p.
        """
        p, end = max(counts), self.end
        moves = p > 1 or any(n and length != end for n, length in zip(counts, self.lengths))
        for layer in self.layers if moves else ():
            if layer.is_initialized:
                _gather(layer.keys, path[:, :p], end, self.lengths)
                _gather(layer.values, path[:, :p], end, self.lengths)
        self.lengths = [n + more for n, more in zip(self.lengths, counts)]

    def rewind(self, lengths: list[int]) -> None:
        """Forget each row's entries from ``lengths[b]`` on."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths)]


def _gather(entries: Tensor, path: Tensor, end: int, lengths: list[int]) -> None:
    """Copy slots ``end + path[b]`` of [B, heads, capacity, size] to ``lengths[b]`` and on.

    What lands behind a row's accepted nodes is not committed and does no harm: a draft has at
    least as many nodes as ``path`` has columns, so these slots exist.
    """
    batch, p = path.shape
    path = path.to(entries.device)
    if batch == 1:
        kept = entries.index_select(2, path[0] + end)
        entries[:, :, lengths[0] : lengths[0] + p] = kept
        return
    shape = (batch, entries.shape[1], p, entries.shape[3])
    source = (path + end)[:, None, :, None].expand(shape)
    starts = torch.tensor(lengths, device=entries.device)[:, None]
    slots = starts + torch.arange(p, device=entries.device)
    entries.scatter_(2, slots[:, None, :, None].expand(shape), entries.gather(2, source))

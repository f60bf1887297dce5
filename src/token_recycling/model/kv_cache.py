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
        # Zeros, not garbage: a masked entry still meets a zero weight, and 0 · NaN is NaN.
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], self.cache.capacity, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states of one forward; return all entries up to and including them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin = self.cache.end
        end = begin + key_states.shape[2]
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
    position. A forward writes its entries of every row from slot ``end`` on, after ``reserve``.
    Keys and values of all layers of one shape lie in one tensor, so that a commit is two
    operations whatever the number of layers.
    """

    def __init__(self, layers: int, batch: int) -> None:
        super().__init__(layers=[PreallocatedLayer(self) for _ in range(layers)])
        self.lengths = [0] * batch
        self.capacity = 0
        # Each [g, B, heads, capacity, size], with the layers' attributes that view it.
        self._stacks: list[tuple[Tensor, list[tuple[PreallocatedLayer, str]]]] = []

    @property
    def end(self) -> int:
        """First slot behind every row's committed entries."""
        return max(self.lengths)

    def reserve(self, queries: int) -> None:
        """Make room for a forward of ``queries`` tokens.

        Growth by a quarter, and by no less than a chunk, keeps all copying linear in the length.
        """
        if self.end + queries <= self.capacity:
            return
        step = max(defaults.CACHE_CHUNK, self.capacity // 4)
        old, self.capacity = self.capacity, max(self.end + queries, self.capacity + step)
        self._stack()
        for index, (stack, views) in enumerate(self._stacks):
            grown = stack.new_zeros(*stack.shape[:3], self.capacity, stack.shape[4])
            grown[:, :, :, :old] = stack
            self._bind(index, grown, views)

    def _stack(self) -> None:
        """Once the first forward has shown the shapes, put equal ones into one tensor."""
        if self._stacks:
            return
        alike: dict[Any, list[tuple[PreallocatedLayer, str]]] = {}
        for layer in self.layers:
            for name in ("keys", "values") if layer.is_initialized else ():
                entries = getattr(layer, name)
                key = (entries.shape, entries.dtype, entries.device)
                alike.setdefault(key, []).append((layer, name))
        for index, views in enumerate(alike.values()):
            stacked = torch.stack([getattr(layer, name) for layer, name in views])
            self._stacks.append((stacked, views))
            self._bind(index, stacked, views)

    def _bind(self, index: int, stack: Tensor, views: list[tuple[PreallocatedLayer, str]]) -> None:
        self._stacks[index] = (stack, views)
        for (layer, name), entries in zip(views, stack.unbind(0)):
            setattr(layer, name, entries)

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Keep the entries of the last forward that lie on the accepted paths.

        Args:
            path: int64 [B, p]; ``path[b, :counts[b]]`` are the nodes to keep, in order.
            counts: nodes to keep per row, 0 … p.
        """
        p, end = max(counts), self.end
        if p > 1 or any(n and length != end for n, length in zip(counts, self.lengths)):
            self._stack()
            for stack, _ in self._stacks:
                _gather(stack, path[:, :p].to(stack.device), end, self.lengths)
        self.lengths = [n + more for n, more in zip(self.lengths, counts)]

    def entries(self, begin: int, end: int) -> list[Tensor]:
        """Copy the keys and values of all layers in slots ``begin`` to ``end`` - 1."""
        filled = [layer for layer in self.layers if layer.is_initialized]
        both = [entries for layer in filled for entries in (layer.keys, layer.values)]
        return [entries[:, :, begin:end].clone() for entries in both]

    def clear_drafts(self) -> None:
        """Write zeros behind every row's committed entries: a masked NaN is still a NaN."""
        for layer in self.layers:
            for entries in (layer.keys, layer.values) if layer.is_initialized else ():
                for row, length in enumerate(self.lengths):
                    entries[row, :, length:] = 0

    def rewind(self, lengths: list[int]) -> None:
        """Forget each row's entries from ``lengths[b]`` on."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths)]


def _gather(stack: Tensor, path: Tensor, end: int, lengths: list[int]) -> None:
    """Copy slots ``end + path[b]`` of [g, B, heads, capacity, size] to ``lengths[b]`` and on.

    What lands behind a row's accepted nodes is not committed and does no harm: a draft has at
    least as many nodes as ``path`` has columns, so these slots exist.
    """
    batch, p = path.shape
    if batch == 1:
        kept = stack.index_select(3, path[0] + end)
        stack[:, :, :, lengths[0] : lengths[0] + p] = kept
        return
    shape = (stack.shape[0], batch, stack.shape[2], p, stack.shape[4])
    source = (path + end)[None, :, None, :, None].expand(shape)
    starts = torch.tensor(lengths, device=stack.device)[:, None]
    slots = starts + torch.arange(p, device=stack.device)
    stack.scatter_(3, slots[None, :, None, :, None].expand(shape), stack.gather(3, source))


class FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer in the same memory, at the same shape, whatever is written.

    Behind ``slots`` of every forward nothing is hidden: masks say what may be seen.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, cache: FixedCache, like: PreallocatedLayer) -> None:
        super().__init__()
        self.cache = cache
        if not like.is_initialized:  # it reads another layer's entries
            return
        self.keys, self.values = (
            states.new_zeros(cache.batch, states.shape[1], cache.slots, states.shape[3])
            for states in (like.keys, like.values)
        )
        self.device, self.dtype, self.is_initialized = like.device, like.dtype, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states of one forward to the slots of the draft; return all entries."""
        self.keys.index_copy_(2, self.cache.draft_slots, key_states)
        self.values.index_copy_(2, self.cache.draft_slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Not known to the host; positions are given."""
        return 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of the keys."""
        return self.cache.slots, 0

    def get_max_length(self) -> int:
        """The slots there are."""
        return self.cache.slots

    get_max_cache_shape = get_max_length


class FixedCache(Cache):  # type: ignore[misc]
    """A KV cache of fixed shape for a fused step: lengths live on the device, not on the host.

    Attributes:
        lengths: int64 [B], committed entries of each row.
        draft_slots: int64 [n], slots that the draft of the current step is written to.
    """

    def __init__(self, like: RecyclingCache, batch: int, slots: int, device: torch.device) -> None:
        """Have room for ``slots`` entries of ``batch`` rows, in layers like those of ``like``."""
        self.batch, self.slots = batch, slots
        super().__init__(layers=[FixedLayer(self, layer) for layer in like.layers])
        self._filled = [n for n, layer in enumerate(self.layers) if layer.is_initialized]
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.draft_slots = self.lengths

    def _pairs(self, cache: RecyclingCache) -> list[tuple[Any, Any]]:
        return [(self.layers[n], cache.layers[n]) for n in self._filled]

    def take(self, cache: RecyclingCache) -> None:
        """Copy the committed entries of ``cache``."""
        end = cache.end
        for layer, given in self._pairs(cache):
            layer.keys[:, :, :end] = given.keys[:, :, :end]
            layer.values[:, :, :end] = given.values[:, :, :end]
        self.lengths.copy_(torch.tensor(cache.lengths, device="cpu"))

    def give(self, cache: RecyclingCache, lengths: list[int]) -> None:
        """Copy the entries of ``lengths`` back."""
        end = max(lengths)
        cache.rewind([0] * self.batch)
        cache.reserve(end)
        for layer, taken in self._pairs(cache):
            taken.keys[:, :, :end] = layer.keys[:, :, :end]
            taken.values[:, :, :end] = layer.values[:, :, :end]
        cache.lengths = list(lengths)

    def clear(self) -> None:
        """Write zeros everywhere: a masked NaN is still a NaN."""
        for n in self._filled:
            self.layers[n].keys.zero_()
            self.layers[n].values.zero_()

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keep the draft's entries on the accepted paths, and count them.

        What lands behind a row's accepted nodes is not committed and does no harm.

        Args:
            path: int64 [B, p], the accepted nodes of each row first.
            counts: int64 [B], how many.
        """
        source = self.draft_slots[path]
        target = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        rows = torch.arange(self.batch, device=path.device)[:, None]
        for n in self._filled:
            for entries in (self.layers[n].keys, self.layers[n].values):
                # Not ``scatter``: compiled, it copies the whole cache.
                entries[rows, :, target] = entries[rows, :, source]
        self.lengths.add_(counts)

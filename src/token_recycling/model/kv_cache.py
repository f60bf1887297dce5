"""A preallocated KV cache with Transformers' cache API and in-place commits."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from skinny_kernels.compiled import as_bits
from skinny_kernels.elementwise import store
from skinny_kernels.gpu.choice import has_device_kernels
from token_recycling import defaults


@dataclass
class _Extent:
    """What the layers know of their cache: with a reference to it, a cache that is no longer
    needed would keep its memory until the next run of the garbage collector.

    Attributes:
        lengths: committed entries of every row.
        capacity: slots for which there is room.
        moves: how often entries of a layer were given another place in memory.
    """

    lengths: list[int]
    capacity: int = 0
    moves: int = 0

    @property
    def end(self) -> int:
        """First slot after the committed entries of all rows."""
        return max(self.lengths, default=0)


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Return zeros of the dtype and on the device of another tensor.

    On a CPU, memory that was never used is zero already, and is not touched before it is needed.
    """
    if like.is_cpu:
        numbers = np.zeros(prod(shape) * like.itemsize, np.uint8)
        return torch.from_numpy(numbers).view(like.dtype).view(shape)
    return like.new_zeros(shape)


def _numbers(tensor: Tensor) -> Any:
    """Return a tensor on a CPU as an array of whole numbers with its bits, others as they are.

    Copies between arrays need no threads, which other programs may hold up.
    """
    return as_bits(tensor) if tensor.is_cpu else tensor


class _PreallocatedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [B, heads, capacity, size], at full length for any window.

    ``update`` writes after the committed entries and commits nothing: entries that the cache's
    next ``commit`` does not keep are overwritten by the next forward.
    """

    is_sliding = False

    def __init__(self, extent: _Extent) -> None:
        super().__init__()
        self.extent = extent

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate with the shapes, dtype and device of the first states."""
        self.device, self.dtype = key_states.device, key_states.dtype
        # Zeros, not uninitialised: a masked entry is multiplied by weight 0, and 0 · NaN is NaN.
        self.keys, self.values = (
            _zeros(states, *states.shape[:2], self.extent.capacity, states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True
        self.extent.moves += 1

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states of one forward; return all entries up to and including them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, tokens = self.extent.end, key_states.shape[2]
        new, slots = (key_states, value_states), self.slots(begin, tokens)
        store(new, slots, self)
        return self.slots(0, begin + tokens)

    def slots(self, begin: int, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of ``count`` slots."""
        return self.keys.narrow(2, begin, count), self.values.narrow(2, begin, count)

    def get_seq_length(self) -> int:
        """Return the number of entries before the current forward."""
        return self.extent.end

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the length and offset of a forward's keys; older versions pass a tensor."""
        queries = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.extent.end + queries, 0

    def get_max_length(self) -> int:
        """Return -1: the length is unbounded."""
        return -1

    get_max_cache_shape = get_max_length  # name before Transformers 5.20


class RecyclingCache(Cache):  # type: ignore[misc]
    """The KV cache of B rows.

    Row b's committed entries are in slots 0 … ``lengths[b]``-1, so a committed entry's slot is
    its position. After ``reserve``, a forward writes the new entries of every row from slot
    ``end`` on. Keys and values of all layers with the same shape are stored in one tensor, so a
    row's commit takes two operations regardless of the number of layers.
    """

    def __init__(self, layers: int, batch: int) -> None:
        self.extent = _Extent([0] * batch)
        super().__init__(layers=[_PreallocatedLayer(self.extent) for _ in range(layers)])
        # Each [g, rows, heads, capacity, size], rows at least B, with the layer attributes that are
        # views of its first B rows.
        self._stacks: list[tuple[Tensor, list[tuple[_PreallocatedLayer, str]]]] = []

    @property
    def lengths(self) -> list[int]:
        """Committed entries of every row."""
        return self.extent.lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self.extent.lengths = lengths

    @property
    def capacity(self) -> int:
        """Slots for which there is room."""
        return self.extent.capacity

    @property
    def end(self) -> int:
        """First slot after the committed entries of all rows."""
        return self.extent.end

    def reserve(self, queries: int) -> None:
        """Make room for a forward of ``queries`` tokens.

        The capacity grows by a quarter, and by at least one chunk, so the total cost of copying is
        linear in the length. Room of rows that were removed is given back then.
        """
        if self.end + queries <= self.capacity:
            return
        step = max(defaults.CACHE_CHUNK, self.capacity // 4)
        old, self.extent.capacity = self.capacity, max(self.end + queries, self.capacity + step)
        self._stack()
        for index, (stack, views) in enumerate(self._stacks):
            layers, rows, heads, _, size = stack.shape
            rows = min(rows, len(self.lengths))
            grown = _zeros(stack, layers, rows, heads, self.capacity, size)
            grown[:, :, :, :old] = stack[:, :rows]
            self._bind(index, grown, views)

    def _stack(self) -> None:
        """Stack entries of equal shape into one tensor, after the first forward."""
        if self._stacks:
            return
        alike: dict[Any, list[tuple[_PreallocatedLayer, str]]] = {}
        for layer in self.layers:
            for name in ("keys", "values") if layer.is_initialized else ():
                entries = getattr(layer, name)
                key = (entries.shape, entries.dtype, entries.device)
                alike.setdefault(key, []).append((layer, name))
        for index, views in enumerate(alike.values()):
            entries = [getattr(layer, name) for layer, name in views]
            stacked = _zeros(entries[0], len(views), *entries[0].shape)
            for given, slots in zip(entries, _numbers(stacked)):
                slots[:] = _numbers(given)
            self._stacks.append((stacked, views))
            self._bind(index, stacked, views)

    def _bind(self, index: int, stack: Tensor, views: list[tuple[_PreallocatedLayer, str]]) -> None:
        self._stacks[index] = (stack, views)
        self.extent.moves += 1
        for (layer, name), entries in zip(views, stack.unbind(0)):
            setattr(layer, name, entries[: len(self.lengths)])

    def commit(self, path: Tensor, counts: list[int]) -> None:
        """Keep the last forward's entries on the accepted paths.

        Args:
            path: int64 [B, p]; ``path[b, :counts[b]]`` are the nodes to keep, in order.
            counts: nodes to keep per row, 0 … p.
        """
        end = self.end
        rows = list(zip(self.lengths, counts))
        if not all(
            length == end and nodes[:count] == list(range(count))
            for (length, count), nodes in zip(rows, path.tolist())
            if count
        ):
            self._stack()
            for stack, _ in self._stacks:
                slots, numbers = _numbers(path.to(stack.device) + end), _numbers(stack)
                for row, (length, count) in enumerate(rows):
                    accepted = numbers[:, row][:, :, slots[row, :count]]
                    numbers[:, row, :, length : length + count] = accepted
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        self._stack()
        return sum(stack.nbytes for stack, _ in self._stacks)

    def copy(self, row: int, slots: int | None = None) -> RecyclingCache:
        """Return an independent cache of one row; at least one forward must have been run.

        Args:
            row: index.
            slots: how many of the first entries; None: all committed ones.
        """
        self._stack()
        length = self.lengths[row] if slots is None else min(slots, self.lengths[row])
        cache = RecyclingCache(len(self.layers), 1)
        cache.extent.lengths, cache.extent.capacity = [length], length
        for stack, views in self._stacks:
            new_views = [(cache.layers[self.layers.index(layer)], name) for layer, name in views]
            cache._add(stack[:, row : row + 1, :, :length].clone(), new_views)
        return cache

    def append(self, other: RecyclingCache) -> None:
        """Append copies of the rows of ``other``, a cache of the same model.

        Room for rows is doubled when it is used up, and that of removed rows is used again.
        """
        self._stack()
        other._stack()
        begin, end = len(self.lengths), len(self.lengths) + len(other.lengths)
        self.lengths = self.lengths + other.lengths
        if self.end > self.capacity:
            self.reserve(0)
        for index, (stack, views) in enumerate(self._stacks):
            if end > stack.shape[1]:
                grown = _zeros(stack, len(stack), max(end, 2 * begin), *stack.shape[2:])
                grown[:, :begin] = stack[:, :begin]
                stack = grown
            given = other._stacks[index][0][:, : len(other.lengths), :, : other.end]
            stack[:, begin:end, :, : other.end] = given
            self._bind(index, stack, views)

    def remove(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self._stack()
        last = len(self.lengths) - 1
        end = self.lengths[last]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        for index, (stack, views) in enumerate(self._stacks):
            if row != last:
                stack[:, row, :, :end] = stack[:, last, :, :end]
            self._bind(index, stack, views)

    @property
    def rows(self) -> int:
        """Rows for which there is room."""
        return self._stacks[0][0].shape[1] if self._stacks else len(self.lengths)

    def _add(self, stack: Tensor, views: list[tuple[_PreallocatedLayer, str]]) -> None:
        """Make ``stack`` the entries of layers that have none."""
        for layer, _ in views:
            layer.device, layer.dtype, layer.is_initialized = stack.device, stack.dtype, True
        self._stacks.append((stack, views))
        self._bind(len(self._stacks) - 1, stack, views)

    def entries(self, begin: int, end: int) -> list[Tensor]:
        """Copy the keys and values of all layers in slots ``begin`` to ``end`` - 1."""
        filled = [layer for layer in self.layers if layer.is_initialized]
        both = [entries for layer in filled for entries in (layer.keys, layer.values)]
        return [entries[:, :, begin:end].clone() for entries in both]

    def clear_drafts(self) -> None:
        """Zero everything after the committed entries: masking does not remove a NaN."""
        for layer in self.layers:
            for entries in (layer.keys, layer.values) if layer.is_initialized else ():
                for row, length in enumerate(self.lengths):
                    entries[row, :, length:] = 0

    def rewind(self, lengths: list[int]) -> None:
        """Drop each row's entries from slot ``lengths[b]`` on."""
        self.lengths = [min(old, new) for old, new in zip(self.lengths, lengths)]


def _fits(keys: Tensor, *states: Tensor) -> bool:
    """Return whether the kernel can write the states of a step."""
    return not torch.compiler.is_compiling() and all(
        one.dtype == keys.dtype and one.stride(3) == 1 and one.shape[:3] == states[0].shape[:3]
        for one in states
    )


class _FixedSlots:
    """Where a forward writes; common to all layers, which must not refer to their cache.

    Attributes:
        slots: int64 [n], slots to which the current step's draft is written.
    """

    def __init__(self, slots: Tensor) -> None:
        self.slots = slots


class _FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, at a fixed address and shape.

    Every forward gets all slots; the masks decide which of them are visible.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, cache: FixedCache, like: _PreallocatedLayer) -> None:
        super().__init__()
        self.writes_to, self.slots = cache.writes_to, cache.slots
        if not like.is_initialized:  # it uses another layer's entries
            return
        self.keys, self.values = (
            states.new_zeros(cache.batch, states.shape[1], cache.slots, states.shape[3])
            for states in (like.keys, like.values)
        )
        self.device, self.dtype, self.is_initialized = like.device, like.dtype, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the constructor has allocated everything."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the states of one forward to the draft slots; return all entries."""
        slots = self.writes_to.slots
        if has_device_kernels(self.keys.device) and _fits(self.keys, key_states, value_states):
            from skinny_kernels.gpu.cache_kernel import write  # imports Triton

            write(self.keys, self.values, key_states, value_states, slots)
        else:
            self.keys.index_copy_(2, slots, key_states)
            self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return 0: the host does not know the lengths, and positions are passed explicitly."""
        return 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the length and offset of the keys."""
        return self.slots, 0

    def get_max_length(self) -> int:
        """Return the number of slots."""
        return self.slots

    get_max_cache_shape = get_max_length


class FixedCache(Cache):  # type: ignore[misc]
    """A KV cache of fixed shape for a graph step, with its lengths on the device.

    Attributes:
        lengths: int64 [B], number of committed entries per row.
        writes_to: where the current step's draft goes.
    """

    def __init__(self, like: RecyclingCache, batch: int, slots: int, device: torch.device) -> None:
        """Allocate ``slots`` entries per row, with layers like those of ``like``."""
        self.batch, self.slots = batch, slots
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.writes_to = _FixedSlots(self.lengths)
        super().__init__(layers=[_FixedLayer(self, layer) for layer in like.layers])
        self._filled = [n for n, layer in enumerate(self.layers) if layer.is_initialized]
        # Keys and values by shape, and the addresses of each group, int64 on the device.
        groups: dict[Any, list[Tensor]] = {}
        for entries in self.entries:
            groups.setdefault((entries.shape, entries.dtype), []).append(entries)
        self.same_shapes = [
            (group, torch.tensor([tensor.data_ptr() for tensor in group], device=device))
            for group in groups.values()
        ]

    @property
    def entries(self) -> list[Tensor]:
        """Keys and values of all layers that have their own, [B, heads, slots, size] each."""
        layers = [self.layers[n] for n in self._filled]
        return [entries for layer in layers for entries in (layer.keys, layer.values)]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(entries.nbytes for entries in self.entries)

    def _pairs(self, cache: RecyclingCache) -> list[tuple[Any, Any]]:
        return [(self.layers[n], cache.layers[n]) for n in self._filled]

    def fill(self, size: int) -> None:
        """Make all rows full of random entries, but for a draft of ``size`` nodes."""
        generator = torch.Generator(self.lengths.device).manual_seed(0)
        for entries in self.entries:
            entries.normal_(generator=generator)
        self.lengths.fill_(self.slots - size)

    def load(self, cache: RecyclingCache) -> None:
        """Copy the committed entries from ``cache``; rows that it does not have are empty."""
        rows, end = len(cache.lengths), cache.end
        for layer, given in self._pairs(cache):
            layer.keys[:rows, :, :end] = given.keys[:, :, :end]
            layer.values[:rows, :, :end] = given.values[:, :, :end]
        lengths = cache.lengths + [0] * (self.batch - rows)
        self.lengths.copy_(torch.tensor(lengths, device="cpu"))

    def store(self, cache: RecyclingCache, lengths: list[int]) -> None:
        """Copy the first ``lengths[b]`` entries of the first rows back to ``cache``."""
        rows, end = len(lengths), max(lengths)
        cache.rewind([0] * rows)
        cache.reserve(end)
        for layer, taken in self._pairs(cache):
            taken.keys[:, :, :end] = layer.keys[:rows, :, :end]
            taken.values[:, :, :end] = layer.values[:rows, :, :end]
        cache.lengths = list(lengths)

    def clear(self) -> None:
        """Zero all entries: masking does not remove a NaN."""
        for n in self._filled:
            self.layers[n].keys.zero_()
            self.layers[n].values.zero_()

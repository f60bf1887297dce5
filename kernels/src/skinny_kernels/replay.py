"""Replays of recorded launches (see ``capture``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from skinny_kernels import attention, elementwise
from skinny_kernels import attention_kernel as kernels
from skinny_kernels.angles import Angles
from skinny_kernels.launch import Launch, pieces_at, tape
from skinny_kernels.team import run
from skinny_kernels.windows import AttentionWindow


class LayerCache(Protocol):
    """A layer's keys and values, [B, heads, slots, size], once they are initialized."""

    keys: Any
    values: Any
    is_initialized: bool


class Extent(Protocol):
    """What a cache holds.

    Attributes:
        lengths: of every row.
        moves: how often keys and values were given another place in memory.
    """

    lengths: list[int]
    moves: int

    @property
    def end(self) -> int:
        """Length of the longest row."""


class StepCache(Protocol):
    """The KV cache that a step reads and writes."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """Those of the model."""

    @property
    def extent(self) -> Extent:
        """What all layers hold."""


class StepInputs(NamedTuple):
    """The tokens of a step, on a CPU.

    Attributes:
        tokens: int64 [B, q], contiguous.
        positions: int64 [B, q].
        ancestors: bool [B, q, q], which of the tokens each one sees.
        cache: has room for them.
        windows: by layer type.
        dtype: of the model's masks.
    """

    tokens: Tensor
    positions: Tensor
    ancestors: Tensor
    cache: StepCache
    windows: dict[str, AttentionWindow]
    dtype: torch.dtype


class CacheLaunch(NamedTuple):
    """A launch that reads or writes the cache.

    Attributes:
        fields: of the launch.
        layer: number of the cache's layer.
        window: type of its window; empty if the launch writes.
    """

    fields: Any
    layer: int
    window: str = ""


@dataclass
class Noted:
    """What a capture has noted of a step.

    Attributes:
        step: what is computed.
        launches: in order.
        given: tensors that are set at a replay: the tokens, then what ``angles`` return.
        angles: of all rotary embeddings.
        copies: the launches that write to the cache.
        attentions: those that read it.
        large: memory that is not worth keeping for all recordings.
        unknown: names and results of functions that no kernel has computed.
        reason: why the step cannot be replayed; None if it can.
    """

    step: StepInputs
    launches: list[Launch] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    angles: list[Angles] = field(default_factory=list)
    copies: list[CacheLaunch] = field(default_factory=list)
    attentions: list[CacheLaunch] = field(default_factory=list)
    large: list[Tensor] = field(default_factory=list)
    unknown: list[tuple[str, Tensor]] = field(default_factory=list)
    reason: str | None = None


class NotRecordableError(Exception):
    """The launches do not say all that the step computes."""


class Recording:
    """The launches of a step of so many rows and tokens."""

    def __init__(self, noted: Noted, output: Any) -> None:
        """Prepare replays; see ``capture.Capture.as_recording``.

        Raises:
            NotRecordableError: the launches do not say all that the step computes.
        """
        if noted.reason is not None:
            raise NotRecordableError(noted.reason)
        launches = noted.launches
        self._held = launches, [one for one in noted.large if one is not output]
        self._angles, self._windows = noted.angles, noted.step.windows
        self._shape, self._dtype = tuple(output.shape), output.dtype
        self._threads = max((launch.threads for launch in launches), default=1)
        self._fields = np.concatenate([np.array(launch.fields, np.int64) for launch in launches])
        self._tape = tape(launches, self._fields)
        self._words = np.frombuffer(self._tape, np.int64)
        begins = np.cumsum([0, *(len(launch.fields) for launch in launches)])
        first = {id(launch.fields): begin for launch, begin in zip(launches, begins)}
        number = {id(launch.fields): n for n, launch in enumerate(launches)}

        for name, tensor in noted.unknown:
            if len(self._inside(tensor.untyped_storage())):
                raise NotRecordableError(f"a kernel reads what {name} computes")
        self._outputs = np.flatnonzero(self._fields == output.data_ptr())
        if not len(self._outputs) or not output.is_contiguous():
            raise NotRecordableError("its logits are not those of a kernel")
        given = [(self._inside(tensor), tensor.data_ptr()) for tensor in noted.given]
        self._inputs = [(at, self._fields[at] - address) for at, address in given]

        self._copies = [(first[id(one.fields)], one.layer) for one in noted.copies]
        self._attentions = [(first[id(one.fields)], one.layer) for one in noted.attentions]
        readers = [one.fields for one in noted.attentions]
        self._pieces_at = np.array([pieces_at(number[id(fields)]) for fields in readers], np.int64)
        self._heads = np.array([attention.heads_of(fields) for fields in readers], np.int64)
        self._part_floats = max(map(attention.part_floats, readers), default=0)
        # By type of window and heads in a group, whose mask is the same: the fields to set.
        groups: dict[tuple[str, int], list[int]] = {}
        for fields, _, window in noted.attentions:
            groups.setdefault((window, fields[kernels.GROUP]), []).append(first[id(fields)])
        self._masks = [(*key, np.array(at, np.int64)) for key, at in groups.items()]
        self._extent: Any = None  # whose memory is bound, as it was after so many moves
        self._moves = 0

    def _inside(self, tensor: Any) -> Any:
        """Return the positions of fields that are addresses inside of a tensor or its storage."""
        begin = tensor.data_ptr()
        end = begin + (tensor.nbytes if isinstance(tensor, Tensor) else tensor.nbytes())
        return np.flatnonzero((self._fields >= begin) & (self._fields < end))

    def replay(self, step: StepInputs) -> Tensor:
        """Compute a step of as many rows and tokens; return its logits [B, q, V]."""
        fields, tokens = self._fields, step.tokens.shape[1]
        extent = step.cache.extent
        if self._extent is not extent or self._moves != extent.moves:
            self._bind_cache(step.cache)
            self._extent, self._moves = extent, extent.moves
        begin, slots = extent.end, extent.end + tokens
        fields[self._entries_at] = self._entries + begin * self._slot_bytes
        logits = torch.empty(self._shape, dtype=self._dtype, device="cpu")
        fields[self._outputs] = logits.data_ptr()
        angles = [table for one in self._angles for table in one.at(step.positions)]
        given = (step.tokens.data_ptr(), *(table.ctypes.data for table in angles))
        for address, (at, offsets) in zip(given, self._inputs):
            fields[at] = offsets + address
        committed = np.array(extent.lengths, np.int64)
        blocks = kernels.blocks_of(slots, tokens)
        parts = np.empty(self._part_floats * blocks, np.float32)
        held = []
        for kind, group, at in self._masks:
            window = self._windows[kind]
            mask = attention.draft_mask(
                committed, step.positions, step.ancestors, window, group, step.dtype
            )
            held.append(mask)
            for index, word in attention.per_step(slots, mask, committed, parts).items():
                fields[at + index] = word
        self._words[self._pieces_at] = self._heads * blocks
        run(self._tape, self._threads)
        return logits

    def _bind_cache(self, cache: StepCache) -> None:
        """Note where the layers' keys and values are."""
        entries_at, entries, slot_bytes = [], [], []
        for at, layer in self._attentions:
            both = cache.layers[layer].keys, cache.layers[layer].values
            for index, word in attention.entries(*both).items():
                self._fields[at + index] = word
        for at, layer in self._copies:
            for n, tensor in enumerate((cache.layers[layer].keys, cache.layers[layer].values)):
                for index, word in elementwise.output_strides(n, tensor):
                    self._fields[at + index] = word
                entries_at.append(at + elementwise.output_at(n))
                entries.append(tensor.data_ptr())
                slot_bytes.append(tensor.stride(2) * tensor.itemsize)
        self._entries_at, self._entries, self._slot_bytes = (
            np.array(numbers, np.int64) for numbers in (entries_at, entries, slot_bytes)
        )

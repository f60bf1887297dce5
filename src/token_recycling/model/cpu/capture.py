"""Decoder layers as recorded launches, which are replayed without Python between them.

Python and PyTorch take as long between the kernels of a small model as the kernels themselves,
because the weights that stream through the caches displace their code. So the launches of a layer
are recorded while the model's own code runs, as a CUDA graph records them, and are replayed when
the layer is called again with as many tokens. Memory that the layer uses in between belongs to the
recording; its inputs, its output and the KV cache are set at every replay.

A recording is right only if nothing but kernels computes: all functions of PyTorch that the layer's
code calls are watched. Views are allowed, sums and products with a number are replaced by kernels,
and anything else leaves the layer as it is. The first recording of a layer is replayed at once, and
must give the same bits.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from token_recycling.model.cpu import attention, elementwise
from token_recycling.model.cpu import attention_kernel as kernels
from token_recycling.model.cpu.attention import PACKED, packed_mask
from token_recycling.model.cpu.launch import Launch, pieces_at, recording, tape
from token_recycling.model.cpu.team import run
from token_recycling.model.cpu.vectors import FORMS

logger = logging.getLogger(__name__)
CHUNK = 2**22  # bytes by which the memory of recordings grows
ALIGNED = 64  # bytes, of a line of the cache
SUMS, PRODUCTS = ("add", "__add__", "__radd__"), ("mul", "__mul__", "__rmul__")
# Functions that compute nothing, although their results are no views: properties of a tensor.
PROPERTIES = ("__get__", "size", "dim", "numel", "stride", "is_contiguous", "data_ptr", "__len__")


class Scratch:
    """Memory that all recordings of a thread use in turn: no two layers are computed at once."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self.rewind()

    def rewind(self) -> None:
        """Give out the same memory again."""
        self._chunk, self._used = 0, 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that has not been given out since the last ``rewind``."""
        count = 1
        for n in shape:
            count *= n
        size = -(-count * dtype.itemsize // ALIGNED) * ALIGNED
        while self._chunk < len(self._chunks):
            chunk = self._chunks[self._chunk]
            if self._used + size <= chunk.numel():
                part = chunk[self._used : self._used + count * dtype.itemsize]
                self._used += size
                return part.view(dtype).view(shape)
            self._chunk, self._used = self._chunk + 1, 0
        self._chunks.append(torch.empty(max(CHUNK, size), dtype=torch.uint8, device="cpu"))
        return self.empty(shape, dtype)


class _NotRecordableError(Exception):
    """The layer computes something that is not a kernel."""


class Capture(TorchFunctionMode):
    """Records the launches of a layer (see ``threads.Recorder``), and watches PyTorch's functions.

    Attributes:
        launches: in order.
        reason: why the layer cannot be replayed; None if it can.
    """

    def __init__(self, scratch: Scratch, cache: Any) -> None:
        super().__init__()
        self._scratch, self._cache = scratch, cache
        self.launches: list[Launch] = []
        self.copies: list[Any] = []  # fields of launches that write to the cache
        self.attentions: list[Any] = []  # and of those that read it
        self.layer_index: int | None = None
        self.mask: Tensor | None = None
        self.reason: str | None = None

    def __enter__(self) -> Any:
        self._scratch.rewind()
        recording.recorder = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *about: Any) -> None:
        recording.recorder = None
        super().__exit__(*about)  # type: ignore[no-untyped-call]

    def add(self, launch: Launch) -> None:
        """Record a launch."""
        self.launches.append(launch)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that belongs to the recording."""
        return self._scratch.empty(tuple(shape), dtype)

    def rebind_copy(self, fields: Any, layer: Any) -> None:
        """Record that a launch writes to the cache."""
        layers = self._cache.layers
        index = next((i for i, candidate in enumerate(layers) if candidate is layer), None)
        if index is None or self.copies:
            self.reason = "it writes to another cache"
        self.layer_index = index
        self.copies.append(fields)

    def rebind_attention(self, fields: Any, key: Tensor, value: Tensor, mask: Tensor) -> None:
        """Record that a launch reads the cache."""
        layer = self._cache.layers[self.layer_index] if self.layer_index is not None else None
        if layer is None or self.attentions or key.data_ptr() != layer.keys.data_ptr():
            self.reason = "it reads another layer's cache"
        self.mask = mask
        self.attentions.append(fields)

    def recording(self, inputs: list[Tensor], others: list[Any], output: Any) -> Recording | None:
        """Return a recording of the layer that has been called; None if it cannot be made.

        Args:
            inputs: all tensors that it was given, but mask and cache.
            others: all other arguments.
            output: what it returned.
        """
        try:
            return Recording(self, inputs, others, output)
        except _NotRecordableError as reason:
            logger.debug("a layer is not recorded: %s", reason)
            return None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in SUMS and not kwargs and len(args) == 2 and _can_add(*args):
            return elementwise.add(*args)
        if name in PRODUCTS and not kwargs and len(args) == 2:
            tensor, factor = args if isinstance(args[0], Tensor) else reversed(args)
            if isinstance(factor, float) and _can_add(tensor, tensor):
                return elementwise.multiply(tensor, factor)
        result = function(*args, **kwargs)
        if not _is_view(name, result, args) and self.reason is None:
            self.reason = f"it calls {name}"
        return result


def _can_add(first: Any, second: Any) -> bool:
    return (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and first.dtype in FORMS
        and first.is_contiguous()
        and second.is_contiguous()
        and first.is_cpu
        and second.is_cpu
    )


def _is_view(name: str, result: Any, args: Any) -> bool:
    """Return whether a function computes nothing: its results are views, or properties."""
    if name in PROPERTIES:
        return True
    results = result if isinstance(result, (tuple, list)) else (result,)
    if not results or not all(isinstance(value, Tensor) for value in results):
        return False
    in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    if in_place or name == "__setitem__":
        return False
    memory = {
        argument.untyped_storage().data_ptr() for argument in args if isinstance(argument, Tensor)
    }
    return all(value.untyped_storage().data_ptr() in memory for value in results)


class Recording:
    """The launches of a layer for one number of tokens."""

    def __init__(
        self, capture: Capture, inputs: list[Tensor], others: list[Any], output: Any
    ) -> None:
        """Prepare replays; see ``Capture.recording``.

        Raises:
            _NotRecordableError: the launches do not say all that the layer does.
        """
        if capture.reason is not None:
            raise _NotRecordableError(capture.reason)
        if len(capture.copies) != 1 or len(capture.attentions) != 1 or capture.mask is None:
            raise _NotRecordableError("it does not attend once")
        if not isinstance(output, Tensor):
            raise _NotRecordableError("it returns more than one tensor")
        self.launches, self._others = capture.launches, others
        (self.copy,), (self.attention,) = capture.copies, capture.attentions
        self.index: Any = capture.layer_index
        self.forms = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs]
        self.shape, self.dtype = tuple(output.shape), output.dtype
        # (fields, position, number of the input, bytes from its beginning)
        self.inputs: list[tuple[Any, int, int, int]] = []
        self.outputs: list[tuple[Any, int]] = []
        output_address = output.data_ptr()
        given = [
            (n, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for n, tensor in enumerate(inputs)
        ]
        for launch in capture.launches:
            for position, number in enumerate(launch.fields):
                if number == output_address:
                    self.outputs.append((launch.fields, position))
                for n, begin, end in given:
                    if begin <= number < end:
                        self.inputs.append((launch.fields, position, n, number - begin))
        if not self.outputs or not output.is_contiguous():
            raise _NotRecordableError("its output is not that of a kernel")

    def fits(self, inputs: list[Tensor], others: list[Any], mask: Tensor, cache: Any) -> bool:
        """Return whether these are such arguments as those recorded, with a mask for them."""
        batch, tokens = self.shape[:2]
        extent = cache.layers[self.index].extent
        return (
            len(inputs) == len(self.forms)
            and others == self._others
            and [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs] == self.forms
            and mask.shape == (batch, 1, tokens, extent.end + tokens)
            and len(extent.lengths) == len(getattr(mask, PACKED).committed) == batch
        )

    def is_like(self, other: Recording) -> bool:
        """Return whether it takes whatever another layer's recording takes."""
        return (
            self.forms == other.forms
            and self._others == other._others
            and attention.shape_of(self.attention) == attention.shape_of(other.attention)
        )

    def is_right(self, inputs: list[Tensor], mask: Tensor, cache: Any, output: Tensor) -> bool:
        """Return whether a replay gives the bits of ``output``."""
        (again,) = Chain([self]).replay(inputs, mask, cache)
        return torch.equal(again.view(torch.uint8), output.view(torch.uint8))


class Chain:
    """Recorded layers, each of which is given the output of the one before, in one run.

    What differs from replay to replay is written to the fields of all launches at once.
    """

    def __init__(self, layers: list[Recording]) -> None:
        """Prepare replays of recordings that are like the first of them."""
        self._layers, self._shape, self._dtype = layers, layers[0].shape, layers[0].dtype
        launches = [launch for layer in layers for launch in layer.launches]
        self._threads = max(launch.threads for launch in launches)
        sizes = [len(launch.fields) for launch in launches]
        self._fields = np.concatenate([np.array(launch.fields, np.int64) for launch in launches])
        self._tape = tape(launches, self._fields)
        begins = np.cumsum([0, *sizes])
        at = {id(launch.fields): begins[n] for n, launch in enumerate(launches)}

        def positions(pairs: Any) -> Any:
            return np.array([at[id(fields)] + position for fields, position in pairs], np.int64)

        attentions = [layer.attention for layer in layers]
        self._attention_pieces = [
            pieces_at(n)
            for n, launch in enumerate(launches)
            if any(launch.fields is fields for fields in attentions)
        ]
        self._attention_fields = positions((fields, 0) for fields in attentions)
        self._copy_fields = positions((layer.copy, 0) for layer in layers)
        given = [(n, *one) for n, layer in enumerate(layers) for one in layer.inputs]
        self._inputs = positions((fields, position) for _, fields, position, _, _ in given)
        # Tensors by number: those given, then the outputs; the hidden states come first.
        count = len(layers[0].forms)
        numbers = [count + layer - 1 if layer and not n else n for layer, _, _, n, _ in given]
        self._input_numbers = np.array(numbers, np.int64)
        self._input_offsets = np.array([offset for *_, offset in given], np.int64)
        written = [(n, *one) for n, layer in enumerate(layers) for one in layer.outputs]
        self._outputs = positions((fields, position) for _, fields, position in written)
        self._output_numbers = np.array([n for n, *_ in written], np.int64)
        self._extent: Any = None  # whose memory is bound, as it was after so many moves
        self._moves = 0

    def replay(self, inputs: list[Tensor], mask: Tensor, cache: Any) -> tuple[Tensor, ...]:
        """Compute the layers.

        Args:
            inputs: like those recorded, of the first layer.
            mask: additive, marked for packed queries.
            cache: a ``RecyclingCache``.

        Returns:
            The output of each layer.
        """
        fields, extent = self._fields, cache.extent
        if self._extent is not extent or self._moves != extent.moves:
            self._bind_cache(cache)
            self._extent, self._moves = extent, extent.moves
        begin, tokens = extent.end, self._shape[1]
        fields[self._slots] = self._entries + begin * self._slot_bytes
        outputs = torch.empty((len(self._layers), *self._shape), dtype=self._dtype, device="cpu")
        size = outputs.nbytes // len(self._layers)
        addresses = outputs.data_ptr() + size * np.arange(len(self._layers))
        given = np.array([tensor.data_ptr() for tensor in inputs], np.int64)
        places = np.concatenate([given, addresses])
        fields[self._inputs] = places[self._input_numbers] + self._input_offsets
        fields[self._outputs] = addresses[self._output_numbers]
        first = self._layers[0].attention
        packed, committed = packed_mask(mask, first[kernels.GROUP])
        parts = attention.parts_for(first, begin + tokens)
        for position, value in attention.per_step(begin + tokens, packed, committed, parts):
            fields[self._attention_fields + position] = value
        pieces = attention.pieces_of(first, begin + tokens)
        for at in self._attention_pieces:
            self._tape[at] = pieces
        run(self._tape, self._threads)
        return outputs.unbind()

    def _bind_cache(self, cache: Any) -> None:
        """Note where the layers' keys and values are."""
        slots, entries, slot_bytes = [], [], []
        for layer, copy, attention_at in zip(
            self._layers, self._copy_fields, self._attention_fields
        ):
            keys, values = (getattr(cache.layers[layer.index], name) for name in ("keys", "values"))
            for position, value in attention.entries(keys, values):
                self._fields[attention_at + position] = value
            for n, tensor in enumerate((keys, values)):
                for position, value in elementwise.output_strides(n, tensor):
                    self._fields[copy + position] = value
                slots.append(copy + elementwise.output_at(n))
                entries.append(tensor.data_ptr())
                slot_bytes.append(tensor.stride(2) * tensor.itemsize)
        self._slots, self._entries, self._slot_bytes = map(np.array, (slots, entries, slot_bytes))


class Watched(Tensor):
    """A layer's output that notes whether anybody computes with it before the next layer does."""

    is_touched = False
    given: Any = None  # all that the layer was given, but this tensor's predecessor

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") not in PROPERTIES:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Watched):
                    value.is_touched = True
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

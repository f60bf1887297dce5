"""Steps as recorded launches, which are replayed without Python between them.

Python and PyTorch take as long between the kernels of a small model as the kernels themselves,
because the weights that stream through the caches displace their code. So the launches of a step
are recorded while the model's own code runs, as a CUDA graph records them, and are replayed in
every later step of as many tokens. Memory that is used in between is shared by the recordings of a
thread (see ``Scratch``), as a replay writes all of it before it reads; tokens, rotary angles,
masks, logits and the KV cache are set at every replay.

A recording is right only if nothing but kernels computes: all functions of PyTorch that the model's
code calls are watched. Views are allowed; embeddings, sums, hyperbolic tangents, heads put together
of parts, and products and quotients with a number are replaced by kernels; any other result must
not be read by a kernel.

While a step is captured, a ``Capture`` is the recorder of its thread (see ``launch.this_thread``).
What it has noted becomes a ``replay.Recording``; ``recordings.Recordings`` are those of a model.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from math import prod
from traceback import clear_frames
from types import TracebackType
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from skinny_kernels import activations, elementwise
from skinny_kernels.angles import Angles
from skinny_kernels.launch import Launch, this_thread
from skinny_kernels.replay import CacheLaunch, Noted, NotRecordableError, Recording, StepInputs
from skinny_kernels.vectors import DTYPES

logger = logging.getLogger(__name__)
CHUNK = 2**22  # bytes by which the memory of recordings grows
ALIGNED = 64  # bytes, of a line of the cache
SUMS, PRODUCTS = ("add", "__add__", "__radd__"), ("mul", "__mul__", "__rmul__")
QUOTIENTS = ("div", "__truediv__", "true_divide")
IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
}
# Functions that compute nothing, although their results are no views: properties of a tensor.
PROPERTIES = (
    *("__get__", "size", "dim", "numel", "stride", "is_contiguous", "data_ptr", "__len__"),
    "is_floating_point",
)


class Scratch:
    """Memory that all recordings of a thread use in turn, as no two steps run at once.

    What a tensor leaves is given to the next one of its size.
    """

    def __init__(self) -> None:
        self._chunks: list[Any] = []
        self.rewind()

    def rewind(self) -> None:
        """Give out the same memory again."""
        self._chunk, self._used = 0, 0
        self._free: dict[int, list[Any]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that no other tensor has that was given out since the last ``rewind``."""
        count = prod(shape) * dtype.itemsize
        size = -(-count // ALIGNED) * ALIGNED
        free = self._free[size]
        block = free.pop() if free else self._new(size)
        owner = block[:count]  # referred to by all tensors in this memory, and by nothing else
        finalize(owner, free.append, block).atexit = False
        return torch.from_numpy(owner).view(dtype).view(shape)

    def _new(self, size: int) -> Any:
        while self._chunk < len(self._chunks):
            chunk = self._chunks[self._chunk]
            if self._used + size <= len(chunk):
                self._used += size
                return chunk[self._used - size : self._used]
            self._chunk, self._used = self._chunk + 1, 0
        self._chunks.append(_aligned(max(CHUNK, size)))
        return self._new(size)


def _aligned(size: int) -> Any:
    """Return memory that begins with a line of the cache."""
    memory = np.empty(size + ALIGNED, np.uint8)
    begin = -memory.ctypes.data % ALIGNED
    return memory[begin : begin + size]


class Capture(TorchFunctionMode):
    """Records the launches of a step (see ``launch.Recorder``), and watches PyTorch's functions.

    Attributes:
        noted: of the step.
    """

    def __init__(self, scratch: Scratch, step: StepInputs) -> None:
        super().__init__()
        self._scratch, self.noted = scratch, Noted(step, given=[step.tokens])
        self._kinds: dict[int, str] = {}  # type of the window, by a packed mask's address

    def __enter__(self) -> Any:
        self._scratch.rewind()
        this_thread.recorder = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        this_thread.recorder = None
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            # PyTorch takes the mode off while it serves a function, and puts it back at the end of
            # a context manager. An interrupt within that delays it until the frames are freed.
            clear_frames(trace)
        if torch._C._len_torch_function_stack():
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def add(self, launch: Launch) -> None:
        """Record a launch."""
        self.noted.launches.append(launch)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory for this step, which all recordings of the thread share if it is small."""
        count = prod(shape) * dtype.itemsize
        if count <= CHUNK // 4:
            return self._scratch.empty(tuple(shape), dtype)
        self.noted.large.append(torch.empty(shape, dtype=dtype, device="cpu"))
        return self.noted.large[-1]

    def note_mask(self, packed: Tensor, kind: str | None) -> None:
        """Note for which type of layers a mask is packed; None: for all."""
        self._kinds[packed.data_ptr()] = kind or next(iter(self.noted.step.windows))

    def note_angles(self, angles: Angles, positions: Tensor, computed: tuple[Tensor, ...]) -> None:
        """Note cosines and sines that were computed for ``positions``."""
        asked = self.noted.step.positions
        if positions.data_ptr() != asked.data_ptr() or positions.shape != asked.shape:
            self.noted.reason = "it rotates by other positions"
        self.noted.angles.append(angles)
        self.noted.given += computed

    def rebind_copy(self, fields: Any, layer: Any) -> None:
        """Record that a launch writes to the cache."""
        layers = self.noted.step.cache.layers
        index = next((i for i, candidate in enumerate(layers) if candidate is layer), None)
        if index is None:
            self.noted.reason = "it writes to another cache"
        else:
            self.noted.copies.append(CacheLaunch(fields, index))

    def rebind_attention(self, fields: Any, key: Tensor, mask: Tensor) -> None:
        """Record that a launch reads the cache."""
        layers = enumerate(self.noted.step.cache.layers)
        addresses = {one.keys.data_ptr(): n for n, one in layers if one.is_initialized}
        index, kind = addresses.get(key.data_ptr()), self._kinds.get(mask.data_ptr())
        if index is None or kind is None:
            self.noted.reason = "it reads another cache"
        else:
            self.noted.attentions.append(CacheLaunch(fields, index, kind))

    def as_recording(self, output: Any) -> Recording | None:
        """Return a recording of the step, whose logits are ``output``; None: it cannot be made."""
        try:
            return Recording(self.noted, output)
        except NotRecordableError as reason:
            logger.debug("steps of %s are not recorded: %s", self.noted.step.tokens.shape, reason)
            return None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        result = self._by_kernel(name, args) if not kwargs else None
        if name == "embedding" and len(args) >= 2 and not any((*args[3:4], kwargs.get("max_norm"))):
            result = _embedded(*args[:2])
        elif name in ("cat", "concat") and args:
            result = _joined(args[0], *args[1:], **kwargs)
        if result is not None:
            return result
        result = function(*args, **kwargs)
        if not _is_view(name, result, args):
            results = result if isinstance(result, (tuple, list)) else (result,)
            writes = "out" in kwargs or (_is_in_place(name) and not self._is_unknown(args[0]))
            if writes or not all(isinstance(x, Tensor) and _memory(x) is not None for x in results):
                self.noted.reason = self.noted.reason or f"it calls {name}"
            else:
                self.noted.unknown += [(name, x) for x in results]
        return result

    def _is_unknown(self, tensor: Any) -> bool:
        """Return whether a tensor is in the memory of what another function has computed."""
        memory = _memory(tensor)
        return memory is not None and any(_memory(one) == memory for _, one in self.noted.unknown)

    def _by_kernel(self, name: str, args: Any) -> Tensor | None:
        """Return what a kernel computes in place of a function; None: nothing."""
        if name == "tanh" and _are_alike(*args, *args):
            return elementwise.activate(args[0], activations.CAP, 1.0)
        if len(args) != 2 or name not in (*SUMS, *PRODUCTS, *QUOTIENTS):
            return None
        first, second = args
        if name in SUMS:
            return elementwise.add(first, second) if _are_alike(first, second) else None
        if name in PRODUCTS and not isinstance(first, Tensor):
            first, second = second, first
        if not _are_alike(first, first):
            return None
        if isinstance(second, Tensor):
            if second.dim() or second.dtype != first.dtype or not second.is_cpu:
                return None
            if self._is_unknown(second):  # a constant of the code
                second = float(second)
        elif type(second) not in (int, float):
            return None
        return (elementwise.multiply if name in PRODUCTS else elementwise.divide)(first, second)


def _are_alike(first: Any, second: Any) -> bool:
    """Return whether these are tensors that ``elementwise.add`` takes."""
    return (
        isinstance(first, Tensor)
        and isinstance(second, Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and first.dtype in DTYPES
        and first.is_contiguous()
        and second.is_contiguous()
        and first.is_cpu
        and second.is_cpu
    )


def _joined(parts: Any, dim: int = 0, **others: Any) -> Tensor | None:
    """Return parts of heads [B, heads, n, size] as whole heads; None if there is no kernel."""
    whole = [part for part in parts if isinstance(part, Tensor) and part.dim() == 4]
    if others or dim not in (-1, 3) or len(whole) < len(parts):
        return None
    shapes = {(*part.shape[:3], part.dtype, part.stride(3), part.is_cpu) for part in whole}
    dtype, stride, is_cpu = next(iter(shapes))[3:]
    if len(shapes) > 1 or dtype not in DTYPES or stride != 1 or not is_cpu:
        return None
    return elementwise.joined(whole)


def _embedded(ids: Tensor, table: Tensor) -> Tensor | None:
    """Return rows of an embedding's table; None if there is no kernel."""
    known = ids.is_cpu and ids.dtype == torch.long and ids.is_contiguous() and ids.numel() > 0
    if not (known and table.is_cpu and table.dtype in DTYPES and table.stride(1) == 1):
        return None
    return elementwise.embed(ids, table)


def _is_in_place(name: str) -> bool:
    """Return whether a function writes to its first argument."""
    return name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _is_view(name: str, result: Any, args: Any) -> bool:
    """Return whether a function computes nothing: its results are views, or properties."""
    if name in PROPERTIES:
        return True
    results = result if isinstance(result, (tuple, list)) else (result,)
    if not results or not all(isinstance(value, Tensor) for value in results):
        return False
    if _is_in_place(name):
        return False
    memory = {_memory(argument) for argument in args if isinstance(argument, Tensor)} - {None}
    return all(_memory(value) in memory for value in results)


def _memory(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory; None: it wraps others, as quantised weights do."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None

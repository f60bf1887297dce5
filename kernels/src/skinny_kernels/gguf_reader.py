"""The header of a GGUF file (docs/gguf.md of ggml, versions 2 and 3), read once and fast.

``gguf.GGUFReader`` makes several NumPy arrays of every string of a vocabulary, which takes half a
minute for 262,144 tokens. ``Reader`` has what Transformers uses of it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"  # the name of a field
# Codes of ``struct`` for numbers in a header, by their names in the package gguf.
SCALARS = {
    **{"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"},
    **{"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"},
    **{"FLOAT32": "f", "FLOAT64": "d", "BOOL": "?"},
}
PLAIN = {"F16": "f2", "F32": "f4", "F64": "f8", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}
PARSED = 255  # no type of GGUF: Transformers takes the parts of such a field as they are


class Field(NamedTuple):
    """A field of a header.

    Attributes:
        parts: its value, or the values of its array.
        data: positions of these among the parts: all of them.
        types: ``PARSED``, since they are Python's.
    """

    parts: Sequence[Any]
    data: Sequence[int]
    types: Sequence[int] = (PARSED,)

    def contents(self) -> Any:
        """Return the value, or the first of an array."""
        return self.parts[0]


class TensorData(NamedTuple):
    """A tensor of a file.

    Attributes:
        name: ggml's.
        tensor_type: ``gguf.GGMLQuantizationType``.
        shape: the fastest-moving dimension first.
        n_bytes: its size.
        data_offset: of its first byte.
        data: its numbers, or uint8 blocks; the slowest-moving dimension first.
    """

    name: str
    tensor_type: Any
    shape: Any
    n_bytes: int
    data_offset: int
    data: Any


class _Header:
    """Reads one value of a header after another."""

    def __init__(self, memory: Any) -> None:
        self.memory, self.at, self.size = memory, 0, len(memory)

    def numbers(self, codes: str) -> tuple[Any, ...]:
        """Read numbers by their codes of ``struct``.

        Raises:
            EOFError: the file ends before.
        """
        begin = self.at
        self.at += struct.calcsize("<" + codes)
        if self.at > self.size:
            raise EOFError
        return struct.unpack_from("<" + codes, self.memory, begin)

    def texts(self, count: int) -> list[str]:
        """Read strings, which are UTF-8."""
        memory, at, size = self.memory, self.at, self.size
        length_at, found = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            if at + 8 > size:
                raise EOFError
            begin = at + 8
            at = begin + length_at(memory, at)[0]
            if at > size:
                raise EOFError
            found.append(memory[begin:at].decode("utf-8"))
        self.at = at
        return found

    def values(self, kind: Any, count: int) -> Sequence[Any]:
        """Read ``count`` values of a type."""
        if kind.name == "STRING":
            return self.texts(count)
        if kind.name == "ARRAY":
            return [self.field(kind).parts for _ in range(count)]
        return self.numbers(f"{count}{SCALARS[kind.name]}")

    def field(self, kind: Any) -> Field:
        """Read the value of a field."""
        count = 1
        if kind.name == "ARRAY":
            of, count = self.numbers("IQ")
            kind = type(kind)(of)
        values = self.values(kind, count)
        return Field(values, range(len(values)))


class Reader:
    """A GGUF file.

    Attributes:
        fields: by name.
        tensors: in the order of the header.
        data: all bytes of the file, privately mapped, so that they may be written to.
        end: bytes that the file must have.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the header.

        Raises:
            EOFError: the file ends within it.
            Exception: whatever a header that is damaged, or of another version, leads to.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

        self.data = np.memmap(path, mode="c")
        with Path(path).open("rb") as stream:
            memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        header = _Header(memory)
        magic, version, tensors, fields = header.numbers("4sIQQ")
        if magic != MAGIC or version not in VERSIONS:
            raise ValueError("not a GGUF file, or of an unknown version")
        self.fields: dict[str, Field] = {}
        for _ in range(fields):
            (name,), (kind,) = header.texts(1), header.numbers("I")
            self.fields[name] = header.field(GGUFValueType(kind))
        found = []
        for _ in range(tensors):
            (name,), (dimensions,) = header.texts(1), header.numbers("I")
            *shape, kind, offset = header.numbers(f"{dimensions}QIQ")
            found.append((name, shape, GGMLQuantizationType(kind), offset))
        alignment = self.fields[ALIGNMENT].contents() if ALIGNMENT in self.fields else 32
        begin = -(-header.at // alignment) * alignment
        self.tensors, self.end = [], begin
        for name, shape, kind, offset in found:
            block, width = GGML_QUANT_SIZES[kind]
            size = math.prod(shape) // block * width
            at = begin + offset
            self.end = max(self.end, at + size)
            self.tensors.append(TensorData(name, kind, np.array(shape, np.uint64), size, at, None))
        if self.end <= len(self.data):
            self.tensors = [
                self._with_data(tensor, *GGML_QUANT_SIZES[tensor.tensor_type])
                for tensor in self.tensors
            ]

    def _with_data(self, tensor: TensorData, block: int, width: int) -> TensorData:
        raw = self.data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
        shape = [int(n) for n in reversed(tensor.shape)]
        plain = PLAIN.get(tensor.tensor_type.name)
        if plain is None:
            shape[-1] = shape[-1] // block * width
        return tensor._replace(data=(raw if plain is None else raw.view(plain)).reshape(shape))

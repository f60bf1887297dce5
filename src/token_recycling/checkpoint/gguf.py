"""GGUF files as checkpoints; Transformers reads them and dequantises the weights."""

from __future__ import annotations

import math
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from token_recycling.errors import TokenRecyclingError

SUFFIX = ".gguf"
MAGIC = b"GGUF"
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
PACKAGES = ("gguf", "accelerate")  # what Transformers needs to read such a file
INSTALL = "pip install 'token-recycling[gguf]'"
BLOCK = re.compile(r"blk\.(\d+)\.")
MERGE = "merge them with llama-gguf-split --merge, and give the result"
SHOWN = 3  # names in a message
HINT = "it may be damaged, or of a kind that the installed transformers and gguf do not read"
# Codes of ``struct`` for numbers in a header, by their names in the package gguf.
SCALARS = {
    **{"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"},
    **{"INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q"},
    **{"FLOAT32": "f", "FLOAT64": "d", "BOOL": "?"},
}


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` names, or the only one of a folder without config.json.

    Returns:
        The file; None if ``path`` is a folder with another checkpoint, or does not exist.

    Raises:
        TokenRecyclingError: it is another file, or a folder with several GGUF files or without any
            checkpoint.
    """
    if path.is_file():
        if path.suffix.lower() != SUFFIX:
            raise TokenRecyclingError(
                f"cannot load the model {str(path)!r}: give a folder, or a GGUF file (*{SUFFIX})"
            )
        return path
    if path.exists() and not path.is_dir():
        raise TokenRecyclingError(
            f"cannot load the model {str(path)!r}: it is neither a folder nor a regular file"
        )
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    if len(files) > 1:
        raise TokenRecyclingError(
            f"{path} has {len(files)} GGUF files ({listed([file.name for file in files])}); "
            "give the path of one of them"
        )
    if not files:
        raise TokenRecyclingError(
            f"cannot load the model {str(path)!r}: the folder has neither config.json nor a "
            f"*{SUFFIX} file"
        )
    return files[0]


def check_gguf(file: Path) -> None:
    """Check that there is a GGUF file and that the packages to read it are installed.

    Raises:
        TokenRecyclingError: one of these is missing.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise TokenRecyclingError(
            f"{file.name} cannot be read without the packages {' and '.join(missing)}; "
            f"install them with {INSTALL}"
        )
    if SPLIT.search(file.name):
        raise TokenRecyclingError(f"{file.name} is one of several files of a model; {MERGE}")
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(MAGIC))
    except OSError as error:
        raise TokenRecyclingError(f"cannot read {file}: {error.strerror}") from error
    if magic != MAGIC:
        found = f"begins with {magic!r} instead of {MAGIC!r}" if magic else "is empty"
        raise TokenRecyclingError(
            f"cannot load the model {file}: it is not a GGUF file, as it {found}"
        )


def check_whole(file: Path) -> None:
    """Check that a file has all of a model, and no layers beyond those that it names.

    Transformers would leave the others out without a word. Called inside ``read_once``.

    Raises:
        TokenRecyclingError: it is cut off or a part of a model, or has other layers.
    """
    _check_end(file)
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        fields, names = reader.fields, [str(tensor.name) for tensor in reader.tensors]
        architecture = fields["general.architecture"].contents()
        blocks = fields[f"{architecture}.block_count"].contents()
        parts = fields["split.count"].contents() if "split.count" in fields else 0
    except Exception:  # a broken file: whoever loads it says why
        return
    if parts > 1:
        raise TokenRecyclingError(f"{file.name} is one of {parts} files of a model; {MERGE}")
    last = max((int(match[1]) for name in names if (match := BLOCK.match(name))), default=-1)
    if isinstance(blocks, int) and last >= blocks:
        raise TokenRecyclingError(
            f"cannot load the model {file}: it has tensors of {last + 1} layers, "
            f"but its block_count is {blocks}"
        )


def _check_end(file: Path) -> None:
    """Check that a file is as long as its header says (docs/gguf.md of ggml, versions 2 and 3).

    Raises:
        TokenRecyclingError: it is shorter.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        try:
            end = _expected_end(stream, size)
        except EOFError:
            raise TokenRecyclingError(
                f"cannot load the model {file}: it is truncated at byte {size:,}, within its "
                "header, or damaged; download it again"
            ) from None
        except Exception:  # damaged, or of another version: whoever loads it says why
            return
    if end > size:
        raise TokenRecyclingError(
            f"cannot load the model {file}: it is truncated at byte {size:,} of {end:,}; "
            "download it again"
        )


def _expected_end(stream: BinaryIO, size: int) -> int:
    """Return the number of bytes that the header of a GGUF file of ``size`` bytes announces.

    Raises:
        EOFError: the file ends within the header.
        Exception: whatever a header that is damaged, or of another version, leads to.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

    def numbers(form: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + form)
        if stream.tell() + layout.size > size:
            raise EOFError
        return layout.unpack(stream.read(layout.size))

    def text() -> str:
        (length,) = numbers("Q")
        return str(numbers(f"{length}s")[0], "utf-8")

    def value(kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return text()
        if kind != GGUFValueType.ARRAY:
            return numbers(SCALARS[kind.name])[0]
        of, count = numbers("IQ")
        inner = GGUFValueType(of)
        if inner in (GGUFValueType.STRING, GGUFValueType.ARRAY):
            for _ in range(count):
                value(inner)
        else:
            numbers(f"{count * struct.calcsize('<' + SCALARS[inner.name])}x")
        return None

    magic, version, tensors, fields = numbers("4sIQQ")
    if magic != MAGIC or version not in (2, 3):
        raise ValueError
    alignment = 32
    for _ in range(fields):
        name, (kind,) = text(), numbers("I")
        found = value(GGUFValueType(kind))
        if name == "general.alignment":
            alignment = int(found)
    last = 0
    for _ in range(tensors):
        text()
        (dimensions,) = numbers("I")
        *shape, kind, offset = numbers(f"{dimensions}QIQ")
        block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        last = max(last, offset + math.prod(shape) // block * width)
    return -(-stream.tell() // alignment) * alignment + last


_reading = threading.Lock()


@contextmanager
def read_once(file: Path) -> Iterator[None]:
    """Let all that reads this GGUF file meanwhile share one reader, and one table of names.

    Transformers parses a file anew for the configuration, the tokenizer and the weights, which
    takes seconds each time for the strings of a vocabulary, and makes a table of the names of
    tensors for every module of the model.
    """
    import gguf

    stock, names, given = gguf.GGUFReader, gguf.get_tensor_name_map, str(file)
    readers: list[Any] = []

    def reader(path: Any, mode: Any = "r") -> Any:
        if str(path) != given:
            return stock(path, mode)
        if not readers:
            # Privately, because PyTorch wants memory that it may write to.
            readers.append(stock(path, "c"))
        return readers[0]

    with _reading:
        gguf.GGUFReader = reader  # type: ignore[assignment, misc]
        gguf.get_tensor_name_map = lru_cache(names)
        try:
            yield
        finally:
            gguf.GGUFReader = stock  # type: ignore[misc]
            gguf.get_tensor_name_map = names


def listed(names: list[str]) -> str:
    """Return the first ``SHOWN`` names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more

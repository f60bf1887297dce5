"""GGUF files as checkpoints; Transformers reads them and dequantises the weights."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from skinny_kernels.errors import CheckpointError
from skinny_kernels.gguf_reader import MAGIC, Reader

SUFFIX = ".gguf"
SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
PACKAGES = ("gguf", "accelerate")  # what Transformers needs to read such a file
INSTALL = "pip install gguf accelerate"
BLOCK = re.compile(r"blk\.(\d+)\.")
MERGE = "merge them with llama-gguf-split --merge, and give the result"
SHOWN = 3  # names in a message
HINT = "it may be damaged, or of a kind that the installed transformers and gguf do not read"


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` names, or the only one of a folder without config.json.

    Returns:
        The file; None if ``path`` is a folder with another checkpoint, or does not exist.

    Raises:
        CheckpointError: it is another file, or a folder with several GGUF files or without any
            checkpoint.
    """
    if path.is_file():
        if path.suffix.lower() != SUFFIX:
            raise CheckpointError(
                f"cannot load the model {str(path)!r}: give a folder, or a GGUF file (*{SUFFIX})"
            )
        return path
    if path.exists() and not path.is_dir():
        raise CheckpointError(
            f"cannot load the model {str(path)!r}: it is neither a folder nor a regular file"
        )
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == SUFFIX)
    if len(files) > 1:
        raise CheckpointError(
            f"{path} has {len(files)} GGUF files ({listed([file.name for file in files])}); "
            "give the path of one of them"
        )
    if not files:
        raise CheckpointError(
            f"cannot load the model {str(path)!r}: the folder has neither config.json nor a "
            f"*{SUFFIX} file"
        )
    return files[0]


def check_gguf(file: Path) -> None:
    """Check that there is a GGUF file and that the packages to read it are installed.

    Raises:
        CheckpointError: one of these is missing.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"{file.name} cannot be read without the packages {' and '.join(missing)}; "
            f"install them with {INSTALL}"
        )
    if SPLIT.search(file.name):
        raise CheckpointError(f"{file.name} is one of several files of a model; {MERGE}")
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    if magic != MAGIC:
        found = f"begins with {magic!r} instead of {MAGIC!r}" if magic else "is empty"
        raise CheckpointError(f"cannot load the model {file}: it is not a GGUF file, as it {found}")


def check_whole(file: Path) -> None:
    """Check that a file has all of a model, and no layers beyond those that it names.

    Transformers would leave the others out without a word. Called inside ``read_once``.

    Raises:
        CheckpointError: it is cut off or a part of a model, or has other layers.
    """
    import gguf

    size = file.stat().st_size
    try:
        reader: Any = gguf.GGUFReader(file)
        fields, names = reader.fields, [str(tensor.name) for tensor in reader.tensors]
        end = reader.end if isinstance(reader, Reader) else 0
        architecture = fields["general.architecture"].contents()
        blocks = fields[f"{architecture}.block_count"].contents()
        parts = fields["split.count"].contents() if "split.count" in fields else 0
    except EOFError:
        raise CheckpointError(
            f"cannot load the model {file}: it is truncated at byte {size:,}, within its "
            "header, or damaged; download it again"
        ) from None
    except Exception:  # a broken file: whoever loads it says why
        return
    if end > size:
        raise CheckpointError(
            f"cannot load the model {file}: it is truncated at byte {size:,} of {end:,}; "
            "download it again"
        )
    if parts > 1:
        raise CheckpointError(f"{file.name} is one of {parts} files of a model; {MERGE}")
    last = max((int(match[1]) for name in names if (match := BLOCK.match(name))), default=-1)
    if isinstance(blocks, int) and last >= blocks:
        raise CheckpointError(
            f"cannot load the model {file}: it has tensors of {last + 1} layers, "
            f"but its block_count is {blocks}"
        )


_reading = threading.Lock()


@contextmanager
def read_once(file: Path) -> Iterator[None]:
    """Let all that reads this GGUF file meanwhile share one reader, and one table of names.

    Transformers parses a file anew for the configuration, the tokenizer and the weights, and makes
    a table of the names of tensors for every module of the model. What ``Reader`` cannot read is
    left to ``gguf.GGUFReader``.
    """
    import gguf

    stock, names, given = gguf.GGUFReader, gguf.get_tensor_name_map, str(file)
    readers: list[Any] = []

    def reader(path: Any, mode: Any = "r") -> Any:
        if str(path) != given:
            return stock(path, mode)
        if not readers:
            try:
                readers.append(Reader(path))
            except EOFError:
                raise
            except Exception:
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

"""The decorator of functions that numba compiles, and threads to run them in."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import pairwise
from operator import is_
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import numba
import numpy as np
import torch
from numba.core import event
from numba.core.caching import FunctionCache, NullCache
from numba.misc.appdirs import AppDirs
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])
CHECKSUM = ".crc"  # ending of a file beside each file of machine code
WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
logger = logging.getLogger(__name__)


def kept(compiler: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
    """Return numba's ``compiler(*arguments, **options)`` that keeps machine code where it can.

    It is kept next to the source file, or in numba's folder for the user; where neither can be
    written to, code is compiled in every process, and the log has one line about it. Damaged and
    exchanged files are replaced.
    """

    def compile_it(function: Any) -> Any:
        with suppress(Exception):  # whatever numba raises where it cannot keep code
            _drop_unknown(FunctionCache(function))  # some compilers load it at once
        for _ in range(2):
            try:
                jitted = compiler(*arguments, cache=True, **options)(function)
            except Exception:  # whatever numba raises for damaged files, a full disk or no folder
                if not _emptied(function):
                    break
            else:
                _survive_damage(jitted)
                return jitted
        beside = Path(function.__code__.co_filename).parent / "__pycache__"
        user = AppDirs(appname="numba", appauthor=False).user_cache_dir
        _note_unkept(f"neither {beside} nor {user} can be written to")
        return compiler(*arguments, **options)(function)

    return compile_it


@lru_cache(maxsize=1)
def _told() -> list[str]:
    """Return why machine code was not kept in this process, if that has been logged."""
    return []


def _note_unkept(reason: str) -> None:
    """Log, once in a process, that machine code is not kept."""
    if not _told():
        _told().append(reason)
        logger.warning(
            "compiled kernels cannot be kept, so that every start takes half a minute: %s; set "
            "NUMBA_CACHE_DIR to another folder",
            reason,
        )


class _Listener(event.Listener):  # type: ignore[misc]
    def __init__(self, told: Callable[[], object]) -> None:
        self.told = told

    def on_start(self, event: Any) -> None:
        self.told()

    def on_end(self, event: Any) -> None:
        """Do nothing: every event has a start."""


@contextmanager
def noticed(told: Callable[[], object]) -> Iterator[None]:
    """Call ``told`` once, when numba begins to compile what no earlier process has kept."""
    with event.install_listener("numba:run_pass", _Listener(lru_cache(told))):
        yield


def _emptied(function: Any) -> bool:
    """Make numba forget the machine code of ``function``; return False if that cannot be done."""
    try:
        FunctionCache(function).flush()
    except Exception:
        return False
    return True


def _kept_files(cache: Any) -> list[Path]:
    """Return the files with the machine code of a function."""
    index = cache._cache_file
    return [Path(index._cache_path, name) for name in index._load_index().values()]


def _checksum(file: Path) -> str:
    """Return a checksum of a file and its name."""
    return f"{crc32(file.read_bytes(), crc32(file.name.encode())):08x}"


def _drop_unknown(cache: Any) -> None:
    """Forget machine code without its checksum beside it: that of another kernel would crash."""
    for file in _kept_files(cache):
        note = file.with_suffix(CHECKSUM)
        if file.exists() and not (note.exists() and note.read_text() == _checksum(file)):
            cache.flush()
            return


def _note_checksums(cache: Any) -> None:
    for file in _kept_files(cache):
        note = file.with_suffix(CHECKSUM)
        if not note.exists() or note.read_text() != _checksum(file):
            note.write_text(_checksum(file))


def _survive_damage(jitted: Any) -> None:
    """Compile again where kept machine code cannot be read, and go on where it cannot be kept."""
    cache = jitted._cache
    if isinstance(cache, NullCache):
        return
    with suppress(Exception):
        _note_checksums(cache)
    load, save = cache.load_overload, cache.save_overload

    def load_overload(signature: Any, context: Any) -> Any:
        try:
            _drop_unknown(cache)
            return load(signature, context)
        except Exception:  # unpickling cut or random files may raise anything
            with suppress(Exception):
                cache.flush()
            return None

    def save_overload(signature: Any, data: Any) -> None:
        try:
            save(signature, data)
            _note_checksums(cache)
        except OSError as error:  # the disk is full
            _note_unkept(f"{cache.cache_path}: {error.strerror}")

    cache.load_overload, cache.save_overload = load_overload, save_overload


def compiled(function: F) -> F:
    """Compile ``function`` at its first call, without the interpreter lock.

    Machine code is kept (see ``kept``), and compiled anew when a file of its folder changes, since
    it contains that of the compiled functions which it calls. These must be of the same folder.
    """
    jitted: F = kept(numba.njit, nogil=True, error_model="numpy")(function)
    _watch_folder(jitted, Path(function.__code__.co_filename).parent)
    return jitted


def _watch_folder(jitted: Any, folder: Path) -> None:
    """Compare times and sizes of all source files where numba looks at the function's own."""
    index = getattr(jitted._cache, "_cache_file", None)  # none where machine code is not kept
    if index is not None:
        index._source_stamp = _stamp(folder)


@lru_cache
def _stamp(folder: Path) -> tuple[tuple[float, int], ...]:
    """Return times and sizes of the source files of a folder."""
    states = [path.stat() for path in sorted(folder.glob("*.py"))]
    return tuple((state.st_mtime, state.st_size) for state in states)


def as_array(tensor: Tensor) -> Any:
    """Return a tensor on the host as a contiguous array.

    A compiled function is compiled anew for every combination of memory layouts, hence one layout.
    """
    array = tensor.numpy()
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def as_bits(tensor: Tensor) -> Any:
    """Return a tensor on the host as an array of whole numbers with its bits."""
    return tensor.view(WHOLE_NUMBERS[tensor.itemsize]).numpy()


class Views:
    """Arrays that share the memory of tensors, made anew when a tensor is another one.

    Making one takes as long as a small kernel does, and a step needs some tens of them.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] = ()
        self._arrays: tuple[Any, ...] = ()

    def of(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Return the arrays of tensors on the host; of float16 their bits, as uint16."""
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            self._arrays = tuple(
                (one.view(torch.uint16) if one.dtype == torch.float16 else one).numpy()
                for one in tensors
            )
            self._tensors = tensors
        return self._arrays

    def __reduce__(self) -> tuple[type[Views], tuple[()]]:
        """Copies have tensors of their own, so they begin without arrays."""
        return Views, ()


@lru_cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="skinny-kernels")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)


def in_threads(count: int, least: int, run: Callable[[slice], object]) -> None:
    """Call ``run`` with slices of ``range(count)``, in threads if there is enough work.

    Args:
        count: number of independent items.
        least: minimum of items per thread.
        run: releases the interpreter lock, as compiled functions do.
    """
    threads = min(torch.get_num_threads(), count // max(least, 1))
    if threads < 2:
        run(slice(0, count))
        return
    bounds = [count * i // threads for i in range(threads + 1)]
    parts = [slice(*pair) for pair in pairwise(bounds)]
    others = [(_pool().submit(run, part), part) for part in parts[1:]]
    run(parts[0])
    for other, part in others:
        if other.cancel():  # no thread has begun it: other programs may keep the cores busy
            run(part)
        else:
            other.result()

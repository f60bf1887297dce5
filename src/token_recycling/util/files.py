"""The cache folder, and atomic writes: a reader never sees a partially written file."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from token_recycling.errors import TokenRecyclingError

PARTIAL = ".partial"
ABANDONED = 24 * 3600.0  # seconds after which a partial file of another machine is stale
_numbers = itertools.count()  # next() is atomic, so partial files of one process are distinct


def cache_folder() -> Path:
    """Return ``$TOKEN_RECYCLING_CACHE``, or ``token-recycling`` in the user's cache folder.

    Raises:
        TokenRecyclingError: the user has no home, as some users of containers.
    """
    if override := os.environ.get("TOKEN_RECYCLING_CACHE"):
        return Path(override)
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        message = "there is no home folder for a cache; set TOKEN_RECYCLING_CACHE to a folder"
        raise TokenRecyclingError(message) from error
    return folder / "token-recycling"


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary file next to ``path``, then rename that to ``path``.

    Links are followed. An existing file keeps its mode; a new one gets mode 0666 less the umask.
    Partial files left by killed writers of the same file are removed.

    Raises:
        TokenRecyclingError: the folder is missing or not writable, or ``path`` is not a regular
            file.
    """
    try:
        place = _regular(Path(path))
        partial = _partial(place)
        _remove_abandoned(place)
        # Created here so that the umask applies; ``write`` may replace the file.
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except (OSError, ValueError, TypeError) as error:  # ValueError: a null character
        raise _failure(path, error) from error
    try:
        mode = stat.S_IMODE((place if place.exists() else partial).stat().st_mode)
        write(partial)
        if stat.S_IMODE(partial.stat().st_mode) != mode:
            partial.chmod(mode)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(place)
    except OSError as error:
        raise _failure(path, error) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def make_folder_atomically(path: Path, fill: Callable[[Path], object]) -> None:
    """Call ``fill`` with a temporary folder next to ``path``, then rename that to ``path``.

    A folder at ``path`` is replaced. Temporary folders are removed: this one if ``fill`` fails, and
    those of killed processes.

    Raises:
        TokenRecyclingError: the folder cannot be written.
    """
    partial, old = _partial(path), _partial(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        partial.mkdir()
        try:
            fill(partial)
            with suppress(FileNotFoundError):
                path.rename(old)
            partial.rename(path)
        finally:
            for folder in (partial, old):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise _failure(path, error) from error


def make_folder(path: Path) -> None:
    """Make the folder ``path`` and its parents where they are missing.

    Raises:
        TokenRecyclingError: the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise _failure(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 atomically.

    Raises:
        TokenRecyclingError: see ``write_atomically``.
    """
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_tensors(
    path: str | Path, tensors: dict[str, Any], about: dict[str, str] | None = None
) -> None:
    """Write tensors as a safetensors file atomically.

    Args:
        path: of the file.
        tensors: contiguous, by name.
        about: the file's metadata.

    Raises:
        TokenRecyclingError: see ``write_atomically``.
    """
    from safetensors.torch import save  # imports PyTorch

    # Not save_file, which writes another temporary file, and leaves it if it is killed.
    content = save(tensors, about)
    write_atomically(path, lambda partial: partial.write_bytes(content))


def is_file(path: str | Path) -> bool:
    """Return True if ``path`` is an existing file; False for an invalid path too."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError, TypeError):
        return False


def _failure(path: object, error: Exception) -> TokenRecyclingError:
    reason = getattr(error, "strerror", None) or error
    return TokenRecyclingError(f"cannot write {path}: {reason}")


def _regular(path: Path) -> Path:
    """Return ``path`` with all links resolved; the file need not exist.

    Raises:
        OSError: it exists and is a folder, a device or the like.
    """
    place = Path(os.path.realpath(path))
    if os.path.lexists(place) and not place.is_file():
        raise OSError("not a regular file")
    return place


def _short(name: str) -> str:
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:12]


def _partial(place: Path) -> Path:
    """Return a new name for a temporary file or folder next to ``place``."""
    machine, writer = _short(socket.gethostname()), f"{os.getpid()}-{next(_numbers)}"
    return place.with_name(f".{_short(place.name)}-{machine}-{writer}{PARTIAL}")


def _remove_abandoned(place: Path) -> None:
    """Remove partial files and folders for ``place`` whose writers no longer run."""
    for file in place.parent.glob(f".{_short(place.name)}-*-*-*{PARTIAL}"):
        with suppress(OSError, ValueError):
            _, machine, process, _ = file.name.split("-")
            if machine == _short(socket.gethostname()):
                gone = not _runs(int(process))
            else:
                gone = time.time() - file.stat().st_mtime > ABANDONED
            if gone and file.is_dir():
                shutil.rmtree(file, ignore_errors=True)
            elif gone:
                file.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    """Return True if the process runs or this cannot be determined."""
    if os.name == "posix":
        try:
            os.kill(process, 0)
        except OSError as error:
            return not isinstance(error, ProcessLookupError)
    return True

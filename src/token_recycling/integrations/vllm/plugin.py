"""What every process of vLLM does when it loads the plug-in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from token_recycling.integrations.engines.versions import (
    VLLM,
    EngineVersionError,
    check_signature,
    check_version,
)

OURS = "token_recycling.integrations.vllm."
VALIDATE = ("_validate_spec_decode", "self", "speculative_config")


def register() -> None:
    """Let requests with ``min_p`` and ``logit_bias`` pass where our drafter is configured.

    vLLM calls this through the entry-point group ``vllm.general_plugins`` whether or not Token
    Recycling is used, so an untested version is not an error here: it is left as it is, with a
    warning.
    """
    _make_llvmlite_inspectable()
    try:
        check_version(VLLM)
        from vllm.sampling_params import SamplingParams

        wrap(SamplingParams, _validating, *VALIDATE)
    except (EngineVersionError, ImportError) as error:
        logging.getLogger(__name__).warning("%s", error)


def is_ours(speculative_config: Any) -> bool:
    """Return whether vLLM is configured with our drafter."""
    return str(getattr(speculative_config, "model", None)).startswith(OURS)


def wrap(owner: Any, around: Callable[..., Any], name: str, *parameters: str) -> None:
    """Replace a function of vLLM by ``around(function)``, once per process.

    Args:
        owner: module or class.
        around: returns the new function.
        name: of the function.
        parameters: that it must have.

    Raises:
        EngineVersionError: it has others.
    """
    function = getattr(owner, name)
    if getattr(function, "token_recycling", False):
        return
    check_signature(function, *parameters)
    wrapped = wraps(function)(around(function))
    wrapped.token_recycling = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _validating(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_validate_spec_decode``, which refuses what ``hooks`` makes possible."""

    def validate(self: Any, speculative_config: Any) -> None:
        if not is_ours(speculative_config):
            method(self, speculative_config)

    return validate


def _make_llvmlite_inspectable() -> None:
    """Let ``vars`` of llvmlite's library object be a dictionary.

    vLLM calls ``vars(value).get(…)`` for every value in every loaded module and fails if numba was
    loaded before: the attribute ``__dict__`` of that object is a wrapped function.
    """
    library = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    functions = getattr(library, "_fntab", None)
    if isinstance(functions, dict):
        functions.setdefault("__dict__", {})

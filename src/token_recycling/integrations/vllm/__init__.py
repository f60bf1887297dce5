"""vLLM plug-in (docs/serving.md).

``speculative_config`` selects the drafter: method ``custom_class``, model
``token_recycling.integrations.vllm.Proposer``.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from token_recycling.integrations.engines.versions import VLLM, EngineVersionError, check_version


def register() -> None:
    """Warn in every vLLM process if this version is untested; change nothing in vLLM.

    vLLM calls this through the entry-point group ``vllm.general_plugins`` whether or not Token
    Recycling is used, so an untested version is not an error here.
    """
    _make_llvmlite_inspectable()
    try:
        check_version(VLLM)
    except EngineVersionError as error:
        logging.getLogger(__name__).warning("%s", error)


def _make_llvmlite_inspectable() -> None:
    """Let ``vars`` of llvmlite's library object be a dictionary.

    vLLM calls ``vars(value).get(…)`` for every value in every loaded module and fails if numba was
    loaded before: the attribute ``__dict__`` of that object is a wrapped function.
    """
    library = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    functions = getattr(library, "_fntab", None)
    if isinstance(functions, dict):
        functions.setdefault("__dict__", {})


def __getattr__(name: str) -> Any:
    """Import the proposer on first access, since it needs vLLM and this module does not."""
    if name == "Proposer":
        from token_recycling.integrations.vllm.proposer import Proposer

        return Proposer
    raise AttributeError(name)

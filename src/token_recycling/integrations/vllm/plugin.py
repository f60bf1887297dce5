"""What every process of vLLM does when it loads the plug-in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

from token_recycling.integrations.engines.versions import (
    VLLM,
    EngineVersionError,
    check_signature,
    check_version,
)

MODEL_RUNNER = "vllm.v1.worker.gpu.model_runner"
MARK = "token_recycling"  # attribute of a ``SpeculativeConfig`` that is ours
CONFIGURE = (
    *("create_speculative_config", "self"),
    *("target_model_config", "target_parallel_config"),
)
SPECULATOR = ("init_speculator", "vllm_config", "device", "req_states")
VALIDATE = ("_validate_spec_decode", "self", "speculative_config")


def register() -> None:
    """Let ``speculative_config`` have the method ``token_recycling``.

    vLLM calls this through the entry-point group ``vllm.general_plugins`` in each of its processes,
    whether or not Token Recycling is used. So an untested version is not an error here: it is left
    as it is, with a warning.
    """
    _make_llvmlite_inspectable()
    try:
        check_version(VLLM)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import SamplingParams
        from vllm.v1.worker.gpu import spec_decode

        wrap(EngineArgs, _configuring, *CONFIGURE)
        wrap(SamplingParams, _validating, *VALIDATE)
        wrap(spec_decode, _initialising, *SPECULATOR)
        runner = sys.modules.get(MODEL_RUNNER)
        if runner is not None:  # has imported the function
            wrap(runner, _initialising, *SPECULATOR)
    except (EngineVersionError, ImportError) as error:
        logging.getLogger(__name__).warning("%s", error)


def is_ours(speculative_config: Any) -> bool:
    """Return whether vLLM is configured with our drafter."""
    return getattr(speculative_config, MARK, False) is True


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


def _configuring(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``create_speculative_config`` to translate ours into vLLM's (see ``configure``)."""

    def create(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        ours = False
        if isinstance(self.speculative_config, dict):
            import vllm.envs as envs
            from vllm.config import SpeculativeConfig
            from vllm.platforms import current_platform

            from token_recycling.integrations.vllm.options import configure, expects_trees

            _make_llvmlite_inspectable()  # it may be that the line above has loaded it
            known = {field.name for field in fields(SpeculativeConfig)}
            on_cpu = current_platform.is_cpu() and not envs.VLLM_USE_V2_MODEL_RUNNER
            capability = (
                current_platform.get_device_capability() if current_platform.is_cuda() else None
            )
            trees = not on_cpu and expects_trees(
                self, target_model_config, target_parallel_config, capability
            )
            ours = configure(self, on_cpu, trees, known)
        config = method(self, target_model_config, target_parallel_config)
        if ours:
            object.__setattr__(config, MARK, True)
        return config

    return create


def _initialising(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``init_speculator`` of Model Runner V2 to make ours."""

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        from token_recycling.integrations.vllm.options import options_of

        options = options_of(vllm_config)
        if options is None:
            return function(vllm_config, device, req_states)
        from token_recycling.integrations.vllm import speculator

        speculator.install(sys.modules[MODEL_RUNNER], wrap)
        return speculator.Speculator(vllm_config, req_states, options)

    return init_speculator


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

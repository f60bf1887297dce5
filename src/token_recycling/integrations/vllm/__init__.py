"""Token Recycling as a plug-in of vLLM (docs/serving.md).

The drafter is named by ``speculative_config``: method ``custom_class``, model
``token_recycling.integrations.vllm.Proposer``.
"""

from __future__ import annotations

import logging
from typing import Any

from token_recycling.integrations.engines.versions import VLLM, EngineVersionError, check_version


def register() -> None:
    """Say in every process of vLLM whether this version is known; changes nothing there.

    vLLM calls this through the entry-point group ``vllm.general_plugins``, whether or not Token
    Recycling is used, so an unknown version is no error yet.
    """
    try:
        check_version(VLLM)
    except EngineVersionError as error:
        logging.getLogger(__name__).warning("%s", error)


def __getattr__(name: str) -> Any:
    """Load the proposer when it is asked for: it needs vLLM, this module does not."""
    if name == "Proposer":
        from token_recycling.integrations.vllm.proposer import Proposer

        return Proposer
    raise AttributeError(name)

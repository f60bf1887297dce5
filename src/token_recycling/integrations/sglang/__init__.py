"""Token Recycling as a plug-in of SGLang (docs/serving.md): algorithm ``TOKEN_RECYCLING``."""

from __future__ import annotations

import logging

from token_recycling.integrations.engines.versions import SGLANG, EngineVersionError, check_version


def register() -> None:
    """Register the algorithm; SGLang calls this in the engine and in every scheduler process.

    It does so through the entry-point group ``sglang.srt.plugins``, whether or not Token
    Recycling is used: an unknown version is said, and is an error only for who asks for it.
    """
    try:
        check_version(SGLANG)
        from token_recycling.integrations.sglang.algorithm import register_algorithm
    except (EngineVersionError, ImportError) as error:
        logging.getLogger(__name__).warning("TOKEN_RECYCLING is not available: %s", error)
        return
    register_algorithm()

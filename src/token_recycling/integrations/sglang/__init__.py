"""SGLang plug-in (docs/serving.md): the algorithm ``TOKEN_RECYCLING``."""

from __future__ import annotations

import logging

from token_recycling.integrations.engines.versions import SGLANG, EngineVersionError, check_version


def register() -> None:
    """Register the algorithm, in the engine and in every scheduler process.

    SGLang calls this through the entry-point group ``sglang.srt.plugins`` whether or not Token
    Recycling is used, so with an untested version it only warns, and the algorithm is unavailable.
    """
    try:
        check_version(SGLANG)
        from token_recycling.integrations.sglang.algorithm import register_algorithm
    except (EngineVersionError, ImportError) as error:
        logging.getLogger(__name__).warning("TOKEN_RECYCLING is not available: %s", error)
        return
    register_algorithm()

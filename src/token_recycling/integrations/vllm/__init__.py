"""vLLM plug-in (docs/serving.md).

The method ``token_recycling`` of ``speculative_config`` selects our drafter: on the device in
vLLM's Model Runner V2, and on the host in the older runner, which is that of CPUs.
"""

from __future__ import annotations

from typing import Any

from token_recycling.integrations.vllm.plugin import register

__all__ = ["register"]


def __getattr__(name: str) -> Any:
    """Import the proposer on first access, since it needs vLLM and this module does not."""
    if name == "Proposer":
        from token_recycling.integrations.vllm.proposer import Proposer

        return Proposer
    raise AttributeError(name)

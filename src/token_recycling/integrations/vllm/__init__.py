"""vLLM plug-in (docs/serving.md).

``speculative_config`` selects the drafter: method ``custom_class``, model
``token_recycling.integrations.vllm.Proposer``.
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

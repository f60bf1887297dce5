"""vLLM plug-in (docs/serving.md).

The method ``token_recycling`` of ``speculative_config`` selects our drafter: on the device in
vLLM's Model Runner V2, and on the host in the older runner, which is that of CPUs.
"""

from token_recycling.integrations.vllm.plugin import register

__all__ = ["register"]

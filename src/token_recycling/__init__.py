"""Token Recycling: lossless speculative decoding without training (arXiv 2408.08696).

from token_recycling import TokenRecycling, fetch_model

recycler = TokenRecycling.from_pretrained(fetch_model())
print(recycler.generate([{"role": "user", "content": "Why is the sky blue?"}]).text)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from token_recycling.errors import PlainDecodingWarning, TokenRecyclingError
from token_recycling.version import __version__

if TYPE_CHECKING:
    from token_recycling.checkpoint.fetch import fetch_model
    from token_recycling.checkpoint.load import BUNDLED_MODEL, load_checkpoint
    from token_recycling.decoding.answers import Chunk, Generation
    from token_recycling.decoding.metrics import Stats, Step
    from token_recycling.drafting.base import Drafter, DrafterState
    from token_recycling.drafting.draft import DraftTree
    from token_recycling.drafting.matrix import AdjacencyMatrix
    from token_recycling.drafting.templates import TreeTemplate
    from token_recycling.hf.call import CallOptions
    from token_recycling.integrations.transformers import enable
    from token_recycling.options import Options
    from token_recycling.recycler import TokenRecycling

# Imported on first use, so that `import token_recycling` does not import PyTorch (seconds).
_LAZY = {
    "BUNDLED_MODEL": "checkpoint.load",
    "AdjacencyMatrix": "drafting.matrix",
    "CallOptions": "hf.call",
    "Chunk": "decoding.answers",
    "DraftTree": "drafting.draft",
    "Drafter": "drafting.base",
    "Generation": "decoding.answers",
    "Options": "options",
    "DrafterState": "drafting.base",
    "Stats": "decoding.metrics",
    "Step": "decoding.metrics",
    "TokenRecycling": "recycler",
    "TreeTemplate": "drafting.templates",
    "enable": "integrations.transformers",
    "fetch_model": "checkpoint.fetch",
    "load_checkpoint": "checkpoint.load",
}

__all__ = [
    "BUNDLED_MODEL",
    "AdjacencyMatrix",
    "CallOptions",
    "Chunk",
    "DraftTree",
    "Drafter",
    "DrafterState",
    "Generation",
    "Options",
    "PlainDecodingWarning",
    "Stats",
    "Step",
    "TokenRecycling",
    "TokenRecyclingError",
    "TreeTemplate",
    "__version__",
    "enable",
    "fetch_model",
    "load_checkpoint",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"token_recycling.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'token_recycling' has no attribute {name!r}")

"""Kernels for few tokens on a CPU, for models of Transformers.

PyTorch's kernels are made for one row or for hundreds. These read every weight once for up to 128
tokens, keep GGUF files packed, and round each token as they would round it alone.

    load_gguf(file)     a model whose weights stay packed as they are in the file
    prepare(model)      a twin of a model whose forwards of few tokens they compute
    product(x, w)       a linear layer
    attend(q, k, v, …)  attention

``skinny_kernels.gpu`` has kernels for GPUs, which Token Recycling calls.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skinny_kernels.functional import attend as attend
    from skinny_kernels.functional import product as product
    from skinny_kernels.gguf_model import load_gguf as load_gguf
    from skinny_kernels.twins import prepare as prepare

# Imported at first use, so that a module of this package alone does not import the others.
_LAZY = {
    "attend": "functional",
    "load_gguf": "gguf_model",
    "prepare": "twins",
    "product": "functional",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"skinny_kernels.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

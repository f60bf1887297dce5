"""Operations of PyTorch whose rounding depends on how many tokens a forward has."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Kernels for matrix products sum in another order for few rows than for many.
PRODUCTS = re.compile(
    r"(^|_|add|b)mm(_|$)|matmul|mv$|dot|linear|attention|conv|einsum|inner|tensordot"
)
# Functions that PyTorch computes in vectors, and what is left at the end of a thread's part one by
# one, with another approximation (measured: ``softplus`` differs in one of 100 numbers).
ACTIVATIONS = re.compile(r"^(silu|gelu|sigmoid|softplus|mish|log_sigmoid)")
VECTORS = 64  # numbers of half precision in the two vectors of a loop's body, the widest there are
ALONE = 256  # numbers a token of which 128 tokens are computed by one thread


class RoundingWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that looks for such operations in forwards of a single token.

    Our kernels are not operations of PyTorch, and sum every row in one order.

    Attributes:
        operation: name of the first operation whose result for a token may depend on what else the
            forward contains; None if there was none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operation: str | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at an operation, and compute it."""
        name = func.overloadpacket.__name__
        if self.operation is None and (func.namespace != "aten" or _depends(name, args)):
            self.operation = name
        return func(*args, **(kwargs or {}))


def _depends(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether the rounding of an operation may depend on the number of tokens."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    if PRODUCTS.search(name):  # of columns and rows, as for rotary embeddings: nothing is summed
        return not (name in ("matmul", "bmm", "mm") and tensors[0].shape[-1] == 1)
    if not ACTIVATIONS.match(name) or not tensors:
        return False
    size = tensors[0].numel()
    return size % VECTORS != 0 or (size > ALONE and size % (VECTORS * torch.get_num_threads()) != 0)

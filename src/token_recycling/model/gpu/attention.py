"""Whether a GPU attends to draft trees by our kernel or by PyTorch's: both are tried."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from token_recycling.drafting.kernels.choice import has_device_kernels
from token_recycling.errors import one_line
from token_recycling.model.limits import AttentionWindow
from token_recycling.util import machine

logger = logging.getLogger(__name__)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 256
# Largest difference of the results, in roundings of the largest value. In half precision both
# kernels add in float32 and round once.
CLOSE, CLOSE_HALF = 64, 8
# Shapes -> whether our kernel is used. An entry never changes, so that a process computes the same
# numbers in every step.
_settled: dict[tuple[Any, ...], bool] = {}


class TreeView(NamedTuple):
    """What the nodes of drafts may see.

    Attributes:
        lengths: int64 [B], committed slots; a draft begins after the longest row.
        positions: int64 [B, n], of the nodes.
        ancestors: bool [B, n, n], contiguous; each node is its own ancestor.
        window: of the layer.
    """

    lengths: Tensor
    positions: Tensor
    ancestors: Tensor
    window: AttentionWindow


def is_here(query: Tensor) -> bool:
    """Return whether ``query`` is on a GPU, in code that is not being compiled."""
    return query.is_cuda and not torch.compiler.is_compiling()


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel can attend with these tensors."""
    return (
        has_device_kernels(query.device)
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= LARGEST_HEAD
        and key.shape == value.shape
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    )


def is_faster(
    query: Tensor, key: Tensor, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]
) -> bool:
    """Return whether our kernel is used for tensors of these shapes; at first, try it.

    It is if its result is that of PyTorch's kernel up to rounding, in less time. While a graph is
    captured nothing can be tried: what was not, is not used.

    Args:
        query: [B, H, n, D].
        key: [B, H / G, s, D].
        ours: attends by our kernel.
        theirs: attends by PyTorch's.
    """
    batch, heads, n, size = query.shape
    kind = (batch, heads, n, size, key.shape[1], key.shape[2].bit_length(), query.dtype)
    found = _settled.get(kind)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        found = _settled[kind] = _trial(ours, theirs)
    return found


def _trial(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> bool:
    """Compare results and times."""
    try:
        mine, its = ours(), theirs()
        roundings = CLOSE if its.dtype == torch.float32 else CLOSE_HALF
        noise = roundings * torch.finfo(its.dtype).eps * its.abs().max()
        if not bool((mine - its).abs().max() <= noise):  # NaN too
            logger.warning("Token Recycling: the attention kernel is not used: results differ")
            return False
        return machine.is_faster(ours, theirs, mine.device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's compiler may raise anything
        logger.warning(
            "Token Recycling: the attention kernel is not used: %s", one_line(error, 200)
        )
        return False

"""Whether a GPU attends to draft trees by our kernel or by PyTorch's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skinny_kernels.errors import one_line
from skinny_kernels.gpu.choice import has_device_kernels
from skinny_kernels.gpu.usable import DTYPES
from skinny_kernels.windows import AttentionWindow

logger = logging.getLogger(__name__)
LARGEST_HEAD = 256
AMPERE = (8, 0)  # compute capability; Turing has no bfloat16, and registers do not suffice
# Largest difference of the results, in roundings of the largest value. In half precision both
# kernels add in float32 and round once.
CLOSE, CLOSE_HALF = 64, 8
# Kinds of layers -> whether our kernel is used. An entry never changes, so that a process computes
# the same numbers in every step.
_settled: dict[tuple[Any, ...], bool] = {}


class TreeView(NamedTuple):
    """What the nodes of drafts may see.

    Attributes:
        lengths: int64 [B], committed slots; a draft begins after the longest sequence.
        positions: int64 [B, n], of the nodes.
        paths: int32 [B, n, n]; the first ``depths`` are the nodes from the root to this one.
        depths: int32 [B, n], nodes of the path; 1 for the root.
        window: of the layer.
    """

    lengths: Tensor
    positions: Tensor
    paths: Tensor
    depths: Tensor
    window: AttentionWindow


def paths_of(ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the paths and depths of a ``TreeView``.

    Args:
        ancestors: bool [B, n, n]; each node is its own ancestor, and follows its parent.
    """
    paths = ancestors.logical_not().to(torch.int8).argsort(dim=2, stable=True)
    return paths.int(), ancestors.sum(dim=2).int()


def is_here(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on a GPU that runs our kernel."""
    return (
        tensor.is_cuda
        and has_device_kernels(tensor.device)
        and torch.cuda.get_device_capability(tensor.device) >= AMPERE
    )


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernel can attend with these tensors; not in code that is compiled."""
    return (
        not torch.compiler.is_compiling()
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= LARGEST_HEAD
        and key.shape == value.shape
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    )


def is_right(
    query: Tensor,
    key: Tensor,
    view: TreeView,
    ours: Callable[[], Tensor],
    theirs: Callable[[], Tensor],
) -> bool:
    """Return whether our kernel is used for layers like this one; at first, try it.

    It is if its result is that of PyTorch's kernel up to rounding. Times are not compared: a node
    must have the same bits in drafts of all sizes, which the two kernels do not share. While a
    graph is captured nothing can be tried: what was not, is not used.

    Args:
        query: [B, H, n, D].
        key: [B, H / G, s, D].
        view: what the nodes see.
        ours: attends by our kernel.
        theirs: attends by PyTorch's.
    """
    heads, size = query.shape[1], query.shape[3]
    kind = (query.device, heads, key.shape[1], size, query.dtype, view.window.rule)
    right = _settled.get(kind)
    if right is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        right = _settled[kind] = _trial(ours, theirs)
    return right


def _trial(ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> bool:
    """Compare results."""
    try:
        output, expected = ours(), theirs()
        roundings = CLOSE if expected.dtype == torch.float32 else CLOSE_HALF
        noise = roundings * torch.finfo(expected.dtype).eps * expected.abs().max()
        if bool((output - expected).abs().max() <= noise):  # False for NaN
            return True
        logger.warning("the attention kernel is not used: results differ")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's compiler may raise anything
        logger.warning("the attention kernel is not used: %s", one_line(error, 200))
    return False

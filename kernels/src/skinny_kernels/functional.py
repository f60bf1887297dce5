"""The kernels as functions, which look at what they are given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from skinny_kernels import attention
from skinny_kernels.attention import is_available
from skinny_kernels.linear import DTYPES, Layer, products


def product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear`` of few rows, without gradients.

    Args:
        inputs: [..., in_features] on the CPU.
        weight: [out_features, in_features]; best with contiguous rows, which are not copied.
        bias: [out_features], or None.

    Returns:
        [..., out_features].

    Raises:
        ValueError: dtypes or shapes do not fit, or it is not one of float32, bfloat16 and float16
            on the CPU.
    """
    _check([inputs, weight] if bias is None else [inputs, weight, bias])
    if weight.dim() != 2 or not inputs.dim() or inputs.shape[-1] != weight.shape[1]:
        shapes = f"{list(inputs.shape)} and {list(weight.shape)}"
        raise ValueError(f"inputs and weight are {shapes}; their last sizes must be equal")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}; it must be {list(weight.shape[:1])}")
    if not (inputs.numel() and weight.numel() and is_available()):
        return linear(inputs, weight, bias)
    weight = weight if weight.stride(1) == 1 and weight.stride(0) else weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    return products(inputs, [Layer(weight, bias)])[0]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float = 0.0
) -> Tensor:
    """Compute softmax(query key^T scale + mask) value of few queries, without gradients.

    Args:
        query: [B, heads, q, size], at most 128 queries of at most 256 numbers.
        key: [B, heads / group, s, size].
        value: [B, heads / group, s, value size].
        mask: additive [B, 1, q, s], finite; what a query does not see has the dtype's lowest value.
        scale: of the scores.
        cap: if not 0, scaled scores s become cap tanh(s / cap).

    Returns:
        [B, q, heads, value size].

    Raises:
        ValueError: dtypes or shapes do not fit, or there is no kernel here.
    """
    _check([query, key, value])
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    batch, heads, tokens, size = query.shape
    groups, slots = key.shape[1], key.shape[2]
    right = (
        key.shape == (batch, groups, slots, size)
        and value.shape[:3] == key.shape[:3]
        and groups > 0
        and heads % groups == 0
        and mask.shape == (batch, 1, tokens, slots)
        and mask.is_floating_point()
        and tokens <= slots
    )
    if not right or not attention.fits(query, key, value, mask):
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value, mask))
        raise ValueError(f"query, key, value and mask are {shapes}; no kernel attends with these")
    before = torch.full((batch,), slots - tokens, device="cpu")
    packed = attention.pack_mask(mask, before, heads // groups)
    return attention.attend(query, key, value, packed, before, scale, cap)


def _check(tensors: list[Tensor]) -> None:
    """Raise ``ValueError`` unless all tensors are of one dtype that the kernels read, on a CPU."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES) or not all(x.is_cpu for x in tensors):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(
            f"dtypes are {names}; all must be one of {list(map(str, DTYPES))}, on a CPU"
        )

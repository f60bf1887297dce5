"""RMS norms, rotary embeddings and gated activations as one Triton kernel each.

Transformers computes a norm by eight operations, a rotation by ten and a gated activation by two.
A captured step of a model of 8B parameters launches 1,400 kernels, of which 300 read weights; the
others take a third of its time. Every intermediate result is rounded where Transformers rounds it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from skinny_kernels.gpu.launch import launch

GATED_BLOCK = 1024


# Whether something is added first is no constant, so that one kernel serves all norms.
@triton.jit(do_not_specialize=["adds"])
def _rms_norm(
    x, residual, weight, sum_out, out, size, epsilon, adds, ADDED: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalise one row, or the sum of two."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, BLOCK)
    inside = entry < size
    place = row * size + entry
    kind = out.dtype.element_ty
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if adds != 0:
        values += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        values = values.to(kind).to(tl.float32)
        tl.store(sum_out + place, values.to(kind), mask=inside)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + epsilon)
    weights = tl.load(weight + entry, mask=inside, other=0.0).to(tl.float32)
    normalised = values * scale
    if ADDED == 0.0:
        normalised = normalised.to(kind).to(tl.float32)
    normalised = normalised * (weights + ADDED)
    tl.store(out + place, normalised.to(kind), mask=inside)


def _normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, added: float
) -> tuple[Tensor, Tensor]:
    """Return a sum, if there is a residual, and its norm."""
    size, out = x.shape[-1], torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    launch(
        _rms_norm,
        (x.numel() // size,),
        *(x, x if residual is None else residual, weight, total, out),
        *(size, epsilon, int(residual is not None)),
        ADDED=added,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return total, out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, added: float = 0.0) -> Tensor:
    """Compute ``x / sqrt(mean(x^2) + epsilon) * (weight + added)``.

    Args:
        x: contiguous [..., size].
        weight: contiguous [size], of the same dtype.
        epsilon: added to the mean square.
        added: 1 where a model stores its weights minus 1, as Gemma does.

    Returns:
        Like ``x``. With ``added`` 0, it is rounded before it is multiplied by the weights.
    """
    return _normalise(x, None, weight, epsilon, added)[1]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, added: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return ``x + residual``, rounded, and its norm (see ``rms_norm``), both like ``x``."""
    return _normalise(x, residual, weight, epsilon, added)


STRIDES = [f"{a}_{b}" for a in ("query", "key") for b in ("row", "head", "token")]
STRIDES += [f"{a}_out_{b}" for a in ("query", "key") for b in ("row", "head", "token")]
STRIDES += [f"{a}_{b}" for a in ("cos", "sin") for b in ("row", "token")]


# Prompts of all lengths and drafts share what is compiled; strides of one token are of any size.
@triton.jit(do_not_specialize=["tokens", "heads", *STRIDES])
def _rotary(
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    tokens,
    heads,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    query_out_row,
    query_out_head,
    query_out_token,
    key_out_row,
    key_out_head,
    key_out_token,
    cos_row,
    cos_token,
    sin_row,
    sin_token,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rotate one head of one token: of the query, or behind these of the key."""
    row = (tl.program_id(0) // tokens).to(tl.int64)
    token = tl.program_id(0) % tokens
    head = tl.program_id(1)
    entry = tl.arange(0, WIDTH)
    inside = entry < HALF
    if head < heads:
        source = query + row * query_row + head * query_head + token * query_token
        out = query_out + row * query_out_row + head * query_out_head + token * query_out_token
    else:
        head -= heads
        source = key + row * key_row + head * key_head + token * key_token
        out = key_out + row * key_out_row + head * key_out_head + token * key_out_token
    kind = query_out.dtype.element_ty
    angle = cos + row * cos_row + token * cos_token + entry
    first_cos = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(angle + HALF, mask=inside, other=0.0).to(tl.float32)
    angle = sin + row * sin_row + token * sin_token + entry
    first_sin = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(angle + HALF, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(source + entry, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + entry, mask=inside, other=0.0).to(tl.float32)
    # Both products are rounded before they are added.
    a = (first * first_cos).to(kind).to(tl.float32) - (second * first_sin).to(kind).to(tl.float32)
    b = (second * second_cos).to(kind).to(tl.float32) + (first * second_sin).to(kind).to(tl.float32)
    tl.store(out + entry, a.to(kind), mask=inside)
    tl.store(out + HALF + entry, b.to(kind), mask=inside)


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the halves of every head by angles of its token (Su et al., arXiv 2104.09864).

    Args:
        query: [B, heads, n, size]; a head's numbers are contiguous.
        key: [B, key heads, n, size], of the same dtype.
        cos: [B, n, size] of the same dtype; a token's numbers are contiguous.
        sin: likewise.

    Returns:
        Tensors of the same shapes.
    """
    outputs = torch.empty_like(query), torch.empty_like(key)
    batch, heads, tokens, size = query.shape
    half = size // 2
    launch(
        _rotary,
        (batch * tokens, heads + key.shape[1]),
        *(query, key, cos, sin, *outputs, tokens, heads),
        *(query.stride()[:3] + key.stride()[:3]),
        *(outputs[0].stride()[:3] + outputs[1].stride()[:3]),
        *(cos.stride()[:2] + sin.stride()[:2]),
        HALF=half,
        WIDTH=triton.next_power_of_2(half),
        num_warps=1,
    )
    return outputs


@triton.jit
def _gated(gate, up, out, size, gate_row, up_row, BLOCK: tl.constexpr):
    """Multiply the SiLU of some numbers of a row by others."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind = out.dtype.element_ty
    x = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    activated = (x / (1.0 + tl.exp(-x))).to(kind).to(tl.float32)
    other = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (activated * other).to(kind), mask=inside)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``.

    Args:
        gate: [..., size], whose rows may be parts of longer ones.
        up: likewise, of the same shape and dtype.

    Returns:
        A contiguous tensor of this shape.
    """
    size = gate.shape[-1]
    rows = gate.numel() // size
    gates, ups = gate.reshape(rows, size), up.reshape(rows, size)
    out = gate.new_empty(gate.shape)
    launch(
        _gated, (rows, triton.cdiv(size, GATED_BLOCK)), gates, ups, out, size,
        gates.stride(0), ups.stride(0), BLOCK=GATED_BLOCK, num_warps=4,
    )  # fmt: skip
    return out

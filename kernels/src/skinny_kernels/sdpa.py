"""Transformers' sdpa in forwards of few tokens, and of prompts, whose masks are marked.

Each key and value is read once for all query heads of a group. ``twins`` has an attention function
of its own, for models that others call: it knows no trees, and no other than causal masks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from skinny_kernels import attention as cpu
from skinny_kernels.attention import PACKED, Packing
from skinny_kernels.gpu import attention as gpu
from skinny_kernels.known_forms import EAGER
from skinny_kernels.windows import AttentionWindow

SDPA = "sdpa"  # its name in Transformers
VIEW = "skinny_kernels_view"  # attribute of such a mask that says what its nodes see
PROMPT = "skinny_kernels_prompt"  # attribute of a causal mask: how many keys precede the queries
# PyTorch may choose cuDNN, whose plans are made anew for every length of the keys (23 to 37 ms).
CUDA_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
ALIGNED = 8  # entries, required of a mask's rows by the memory-efficient kernel
Attention = Callable[..., "tuple[Tensor, Tensor | None]"]


def packed_attention(
    stock: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the queries of all heads of a group packed into one head.

    With a mask, Transformers repeats keys and values for every head of the group, which copies
    the whole cache. This function repeats only the mask, once in a forward. It calls ``stock``
    unless ``pack_queries`` or ``mark_prompt`` has marked the mask.

    Args:
        stock: the attention function that this one replaces.
        module: the attention layer.
        query: [B, heads, q, size].
        key: [B, heads / group, s, size].
        value: like ``key``.
        attention_mask: additive [B, 1, q, s].
        **others: as for sdpa; ``scaling`` multiplies the scores, ``softcap`` caps them.

    Returns:
        The output [B, q, heads, size], and None in place of the attention weights.
    """
    packing: Packing | None = getattr(attention_mask, PACKED, None)
    before: int | None = getattr(attention_mask, PROMPT, None)
    cap = others.get("softcap")  # ignored or refused by PyTorch's attention in Transformers
    uncapped = cap is not None and getattr(stock, "__name__", None) != EAGER
    # Such scores are left to the stock function.
    altered = uncapped or others.get("position_bias") is not None
    if attention_mask is None or altered or (packing is None and before is None):
        return stock(module, query, key, value, attention_mask, **others)
    batch, heads, q, size = query.shape
    group = heads // key.shape[1]
    scale = others.get("scaling")
    same = query.dtype == key.dtype == value.dtype and size == value.shape[3]
    if before is not None and query.is_cpu and same and cap is None:
        return prompt_attention(query, key, value, before, scale), None
    if packing is None or attention_mask.shape[1] != 1:
        return stock(module, query, key, value, attention_mask, **others)
    if cpu.fits(query, key, value, attention_mask):
        scale = size**-0.5 if scale is None else scale
        packed = cpu.packed_mask(attention_mask, group)
        return cpu.attend(query, key, value, *packed, scale, cap or 0.0), None
    if cap is not None or (group == 1 and not query.is_cuda):
        return stock(module, query, key, value, attention_mask, **others)

    def by_pytorch() -> Tensor:
        if group not in packing.masks:
            packing.masks[group] = repeated_mask(attention_mask, group)
        mask = packing.masks[group][..., : key.shape[2]]
        queries = query.reshape(batch, key.shape[1], group * q, size)
        out = _sdpa(queries, key, value, mask, scale)
        return out.reshape(batch, heads, q, -1).transpose(1, 2).contiguous()

    view = getattr(attention_mask, VIEW, None)
    if view is not None and gpu.fits(query, key, value):
        from skinny_kernels.gpu.attention_launch import attend  # imports Triton

        def by_kernel() -> Tensor:
            return attend(query, key, value, view, size**-0.5 if scale is None else scale)

        if gpu.is_right(query, key, view, by_kernel, by_pytorch):
            return by_kernel(), None
    return by_pytorch(), None


def prompt_attention(
    query: Tensor, key: Tensor, value: Tensor, before: int, scale: float | None
) -> Tensor:
    """Attend with consecutive tokens of a prompt to all tokens before them, on a CPU.

    With a mask, PyTorch computes the half of the scores that it hides, and Transformers repeats all
    keys and values. Here the tokens attend to each other causally and to the keys before them
    without a mask, and both results are weighted by their sums of exponentials, as the parts of
    flash decoding are.

    Args:
        query: [B, heads, q, size].
        key: [B, heads / group, before + q, size].
        value: like ``key``.
        before: keys of earlier tokens.
        scale: of the scores; None: ``size ** -0.5``.

    Returns:
        [B, q, heads, size].
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    batch, heads, q, size = query.shape
    group = heads // key.shape[1]
    new_entries = [x[:, :, before:].repeat_interleave(group, dim=1) for x in (key, value)]
    out, weight = flash(query, *new_entries, 0.0, True, scale=scale)
    if before:
        rows = query.reshape(batch, key.shape[1], group * q, size)
        earlier = (key[:, :, :before], value[:, :, :before])
        other, other_weight = flash(rows, *earlier, 0.0, False, scale=scale)
        other, other_weight = other.reshape(out.shape), other_weight.reshape(weight.shape)
        share = torch.sigmoid(other_weight - weight)[..., None].to(out.dtype)
        out = torch.lerp(out, other, share)
    transposed: Tensor = out.transpose(1, 2).contiguous()
    return transposed


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """Call PyTorch's attention; on CUDA not cuDNN's (see ``CUDA_BACKENDS``)."""
    if not query.is_cuda:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    with sdpa_kernel(CUDA_BACKENDS):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def repeated_mask(mask: Tensor, group: int) -> Tensor:
    """Return a mask [B, 1, q, s] for every head of a group, [B, 1, group · q, s].

    Its rows begin at multiples of ``ALIGNED`` entries; else every layer would copy it.
    """
    batch, _, q, s = mask.shape
    repeated = mask.new_empty(batch, 1, group, q, -(-s // ALIGNED) * ALIGNED)
    repeated[..., :s] = mask[:, :, None]
    return repeated.flatten(2, 3)[..., :s]


class PackedSdpa:
    """Context manager in which sdpa is ``packed_attention``, for forwards of ours.

    Model code looks up its attention function by the name in the model's configuration, which is
    common to all threads, so the request to pack is attached to the mask instead: others are
    handled as before. Afterwards the function is Transformers' own again.
    """

    _lock = Lock()
    _inside = 0  # forwards of all threads

    def __enter__(self) -> None:
        with self._lock:
            stock = AttentionInterface._global_mapping[SDPA]
            if stock_of(stock) is stock:
                AttentionInterface.register(SDPA, partial(packed_attention, stock))
            PackedSdpa._inside += 1

    def __exit__(self, *about: Any) -> None:
        with self._lock:
            PackedSdpa._inside -= 1
            if not PackedSdpa._inside:
                AttentionInterface.register(
                    SDPA, stock_of(AttentionInterface._global_mapping[SDPA])
                )


def stock_of(function: Any) -> Any:
    """Return the attention function that ``packed_attention`` replaces, or ``function`` itself."""
    while isinstance(function, partial) and function.func is packed_attention:
        (function,) = function.args
    return function


def pack_queries(
    masks: Tensor | dict[str, Tensor], committed: Tensor | None = None
) -> Tensor | dict[str, Tensor]:
    """Mark ``masks`` (see ``windows.additive_masks``) so that sdpa packs their queries.

    Only for forwards of few tokens: with many, the repeated mask is larger than the keys.

    Args:
        masks: [B, 1, q, s].
        committed: int64 [B] on the host: slots of each row before the queries' own, which are the
            last q; those between are hidden from all. None: all other slots.
    """
    for kind, mask in masks.items() if isinstance(masks, dict) else ((None, masks),):
        if committed is None:
            batch, _, q, s = mask.shape
            committed = torch.full((batch,), s - q, dtype=torch.long, device="cpu")
        setattr(mask, PACKED, Packing(committed, kind))
    return masks


def _by_kind(
    masks: Tensor | dict[str, Tensor], windows: dict[str, AttentionWindow]
) -> dict[str, Tensor]:
    """Return the masks (see ``windows.additive_masks``) by layer type."""
    return masks if isinstance(masks, dict) else dict.fromkeys(windows, masks)


def mark_prompt(
    masks: Tensor | dict[str, Tensor], windows: dict[str, AttentionWindow], before: int
) -> None:
    """Mark the causal masks of a prompt's tokens, which follow ``before`` others in every row.

    Masks with a window are left out.
    """
    for kind, mask in _by_kind(masks, windows).items():
        if windows[kind].rule not in ("sliding", "chunked"):
            setattr(mask, PROMPT, before)


def add_views(
    masks: Tensor | dict[str, Tensor],
    windows: dict[str, AttentionWindow],
    lengths: Tensor,
    positions: Tensor,
    ancestors: Tensor,
    paths: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Let packed queries be served by the kernel for GPUs, which reads no mask.

    Args:
        masks: see ``windows.additive_masks``.
        windows: by layer type.
        lengths: int64 [B], committed entries; the draft follows the longest row.
        positions: int64 [B, n], of the nodes.
        ancestors: bool [B, n, n].
        paths: the result of ``gpu.paths_of``, if it is known.
    """
    if not gpu.is_here(positions):
        return
    paths = gpu.paths_of(ancestors) if paths is None else paths
    for kind, mask in _by_kind(masks, windows).items():
        setattr(mask, VIEW, gpu.TreeView(lengths, positions, *paths, windows[kind]))

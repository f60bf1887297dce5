"""Ways to attend to a tree, and to take the k best logits, side by side; used by gpu_suite.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from token_recycling.drafting.kernels.choice import has_device_kernels
from token_recycling.model.attention import pack_queries, packed_attention
from token_recycling.model.gpu.attention import TreeView
from token_recycling.model.limits import AttentionWindow

Seconds = Callable[[Callable[[], Any]], float]
CONTEXTS = (256, 2048, 8192, 32768)
NODES = (1, 16, 32, 64, 81)


class _Layer(nn.Module):
    """What an attention function asks of the layer that calls it."""

    is_causal = False

    def __init__(self, group: int) -> None:
        super().__init__()
        self.num_key_value_groups = group


def attention(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: Seconds,
    contexts: tuple[int, ...] = CONTEXTS,
    nodes: tuple[int, ...] = NODES,
) -> list[dict[str, Any]]:
    """Time every way to attend with a mask over a tree, and its error against float64.

    Args:
        heads: query heads, KV heads and their size.
        dtype: of queries, keys and values.
        device: to run on.
        seconds: times a call.
        contexts: committed tokens.
        nodes: of the tree, the root included.

    Returns:
        A row for each context, number of nodes and way.
    """
    # Each shape is a variant, of which PyTorch compiles only eight by default.
    with torch._dynamo.config.patch(recompile_limit=2 * len(contexts) * len(nodes)):
        return _attention(heads, dtype, device, seconds, contexts, nodes)


def _attention(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: Seconds,
    contexts: tuple[int, ...],
    nodes: tuple[int, ...],
) -> list[dict[str, Any]]:
    many, few, size = heads
    rows = []
    for context in contexts:
        for n in nodes:
            slots = context + n
            query = torch.randn(1, many, n, size, dtype=dtype, device=device)
            key, value = torch.randn(2, 1, few, slots, size, dtype=dtype, device=device)
            visible = torch.ones(1, n, slots, dtype=torch.bool, device=device)
            visible[:, :, context:] = torch.rand(1, n, n, device=device) < 0.3
            mask = torch.zeros(1, 1, n, slots, dtype=dtype, device=device)
            mask.masked_fill_(~visible[:, None], torch.finfo(dtype).min)
            exact = _exact(query, key, value, mask)
            for name, way in _ways(query, key, value, mask, visible).items():
                row: dict[str, Any] = {"context": context, "nodes": n, "way": name}
                try:
                    with torch.no_grad():
                        found = way()
                        if isinstance(found, Tensor):
                            row["error"] = float((found.double() - exact).abs().max())
                        row["seconds"] = seconds(way)
                except Exception as error:
                    row["failed"] = str(error)[:200]
                rows.append(row)
    return rows


def _ways(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, visible: Tensor
) -> dict[str, Callable[[], Any]]:
    """Attention as [1, n, heads, size], and what one of the ways needs once for all layers."""
    layer = _Layer(query.shape[1] // key.shape[1])
    compiles = query.device.type == "cuda"
    flex: Callable[..., Any] = flex_attention
    if compiles:  # fullgraph: it must not fall back to the slow function
        flex = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    blocks = _blocks(visible)
    marked = mask.clone()
    pack_queries(marked)
    packed = partial(packed_attention, sdpa_attention_forward)
    ours: dict[str, Callable[[], Any]] = {}
    if has_device_kernels(query.device):
        from token_recycling.model.gpu.attention_kernel import Blocks, attend

        n, slots = visible.shape[1:]
        lengths = torch.tensor([slots - n], device=query.device)
        positions = lengths.expand(1, n).contiguous()
        above = visible[:, :, slots - n :].contiguous()
        view = TreeView(lengths, positions, above, AttentionWindow("full"))
        attended = partial(attend, query, key, value, view, query.shape[-1] ** -0.5)
        ours["kernel"] = attended
        if query.dtype != torch.float32 and compiles and torch.cuda.get_device_capability()[0] >= 9:
            # Tiles for Hopper's own matrix instructions, to see whether the kernel should have them
            for how in (Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 3)):
                ours[f"kernel, {how.queries} x {how.keys}"] = partial(attended, how)
    return {
        **ours,
        "repeated": lambda: sdpa_attention_forward(layer, query, key, value, mask)[0],
        "grouped": lambda: sdpa(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2),
        "packed": lambda: packed(layer, query, key, value, marked)[0],
        "flex": lambda: flex(query, key, value, block_mask=blocks, enable_gqa=True).transpose(1, 2),
        "flex's block mask": lambda: _blocks(visible),
    }


def _blocks(visible: Tensor) -> Any:
    def allowed(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return visible[batch, q, kv]

    return create_block_mask(allowed, 1, None, *visible.shape[1:], device=visible.device)


def _exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The same in float64, [1, n, heads, size]."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    return sdpa(query.double(), key, value, attn_mask=mask.double()).transpose(1, 2)


def top_k(
    vocabulary: int, dtype: torch.dtype, device: torch.device, seconds: Seconds, k: int = 8
) -> list[dict[str, Any]]:
    """Time the k best of every node's logits against reading them once."""
    rows = []
    for n in NODES:
        logits = torch.randn(n, vocabulary, device=device).to(dtype)
        ways: dict[str, Callable[[Tensor], Any]] = {
            "read once": lambda rows: rows.amax(dim=-1),
            "topk": lambda rows: rows.topk(k, dim=-1),
        }
        if has_device_kernels(device):
            from token_recycling.drafting.kernels.device.top_k import device_top_k

            ways["by blocks"] = lambda rows: device_top_k(rows, k)
            assert torch.equal(device_top_k(logits, k)[0], logits.topk(k, dim=-1)[0])
        for name, way in ways.items():
            with torch.no_grad():
                rows.append({"nodes": n, "way": name, "seconds": seconds(partial(way, logits))})
    return rows

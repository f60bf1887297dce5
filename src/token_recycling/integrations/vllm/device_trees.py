"""Draft trees in vLLM's Model Runner V2: attention, and the cache after a step.

vLLM schedules a tree as it does a chain: its nodes have the slots of the cache that follow the
text. What differs is done on the device. Before a step, nodes are placed by their depths. Our
kernel attends for the rows up to the last one that has a draft, unless they are longer than the
longest draft, with vLLM's cache; for all others, which read prompts or one token, vLLM's kernel
does. After the step, keys and values of the accepted path are moved behind the root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from skinny_kernels.gpu.attention import AMPERE, LARGEST_HEAD, TreeView
from skinny_kernels.gpu.attention_launch import Pages, attend_pages
from skinny_kernels.gpu.cache_kernel import addresses, move
from skinny_kernels.gpu.usable import DTYPES
from skinny_kernels.windows import AttentionWindow
from token_recycling.drafting.kernels.device.requests import place
from token_recycling.integrations.vllm.device_requests import DeviceRequests

# Their caches are [blocks, heads, slots of a block, keys and values].
IMPLEMENTATIONS = ("FlashAttentionImpl", "TritonAttentionImpl")


def why_chains(vllm_config: Any, runner: Any) -> str | None:
    """Return why trees cannot be verified with a loaded model; None: they can be."""
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    speculative = vllm_config.speculative_config
    mode = compilation.cudagraph_mode
    reasons = {
        "positions of its tokens are not numbers (M-RoPE)": (
            getattr(runner.model_state, "rope_state", None) is not None
        ),
        "some of its tokens see later ones": bool(vllm_config.model_config.is_mm_prefix_lm),
        "its windows leave prompts out": vllm_config.model_config.rswa_window is not None,
        "microbatches are on": parallel.use_ubatching,
        "decode context parallelism is on": parallel.decode_context_parallel_size > 1,
        "keys and values are sent elsewhere": vllm_config.kv_transfer_config is not None,
        "fast prefill is on": bool(vllm_config.cache_config.kv_sharing_fast_prefill),
        "attention is fused with quantisation": bool(compilation.pass_config.fuse_attn_quant),
        "adaptive verification is on": bool(speculative.enable_adaptive_verification),
        "prompts are read in full CUDA graphs": (
            mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL
        ),
        "logits processors of others are loaded": any(
            not type(processor).__module__.startswith("vllm.")
            for processor in runner.sampler.logits_processors
        ),
        "the GPU is older than Ampere": (
            runner.device.type == "cuda"
            and torch.cuda.get_device_capability(runner.device) < AMPERE
        ),
        f"it computes in {vllm_config.model_config.dtype}": (
            vllm_config.model_config.dtype not in DTYPES
        ),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    for layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).values():
        found += _why_not(layer, vllm_config.model_config.dtype)
    return found[0] if found else None


def _why_not(layer: Any, dtype: torch.dtype) -> list[str]:
    """Return why our kernel cannot attend for a layer."""
    if type(layer) is not Attention:
        return [f"it has layers of the kind {type(layer).__name__}"]
    impl = layer.impl
    name = type(impl).__name__
    if name not in IMPLEMENTATIONS or not type(impl).__module__.startswith("vllm."):
        return [f"its attention is {name}, not one of {', '.join(IMPLEMENTATIONS)}"]
    reasons = {
        "its attention has ALiBi": impl.alibi_slopes is not None,
        "its attention has a soft cap": bool(impl.logits_soft_cap),
        "its attention has sinks": impl.sinks is not None,
        "its attention is not that of a decoder": impl.attn_type != "decoder",
        "its attention looks back by chunks": getattr(impl, "chunk_lookback", -1) != -1,
        "its attention has windows to both sides": impl.sliding_window[1] > 0,
        f"a head has {impl.head_size} entries": impl.head_size > LARGEST_HEAD,
        "keys and values differ in size": getattr(layer, "head_size_v", impl.head_size)
        != impl.head_size,
        "its cache has another number format": (
            impl.kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch."))
        ),
    }
    return [reason for reason, applies in reasons.items() if applies]


class _Alike(NamedTuple):
    """Layers whose caches are alike and have the same slots."""

    group: int
    caches: Tensor
    like: Tensor


class DeviceTrees:
    """What a model runner needs to verify trees."""

    def __init__(self, vllm_config: Any, runner: Any, requests: DeviceRequests) -> None:
        """Allocate for the largest batch, and attend in the layers of the model from now on.

        Args:
            vllm_config: vLLM's configuration.
            runner: of a model for which ``why_chains`` is None.
            requests: whose drafts are verified.
        """
        self._runner, self._requests = runner, requests
        n = requests.draft.size
        rows = len(requests.branches)
        self._most = n
        # Rows and nodes of the longest draft in the step that runs; None while graphs are captured
        self._drafted: tuple[int, int] | None = None
        self._positions = runner.input_buffers.positions
        self._paths = torch.zeros((rows, n, n), dtype=torch.int32, device=runner.device)
        self._depths = torch.ones((rows, n), dtype=torch.int32, device=runner.device)
        self._slots: Any = None  # of the step, for each group of layers
        self._alike: list[_Alike] = []
        self._first: Any = None  # the cache of the first layer, as it was when these were found
        self._layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
        for layer in self._layers.values():
            layer.impl.forward = self._attending(layer.impl.forward, layer.impl)

    def place(self, batch: Any, slots: Tensor) -> None:
        """Place the nodes of a step, whose slots [groups, t] are known."""
        self._slots = slots
        rows = batch.num_reqs
        counts = batch.num_draft_tokens_per_req
        self._drafted = (0, 1)
        if counts is not None and counts.any():
            self._drafted = int(counts.nonzero()[0][-1]) + 1, int(counts.max()) + 1
        starts = batch.query_start_loc[: rows + 1]
        place(
            *(batch.idx_mapping, self._requests.draft, starts, batch.cu_num_logits),
            *(self._positions, self._paths, self._depths),
        )

    def _attending(self, forward: Callable[..., Any], impl: Any) -> Callable[..., Any]:
        """Wrap the ``forward`` of an attention layer."""
        left, _ = impl.sliding_window
        window = AttentionWindow("full") if left < 0 else AttentionWindow("sliding", left + 1)

        @wraps(forward)
        def attend(
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *scales: Any,
            **options: Any,
        ) -> Any:
            rows, nodes, others = self._of_step(attn_metadata)
            if others:
                forward(
                    layer, query, key, value, kv_cache, attn_metadata, output, *scales, **options
                )
            if nodes > 1:
                self._attend(impl, window, query, kv_cache, attn_metadata, output, rows, nodes)
            return output

        return attend

    def _of_step(self, metadata: Any) -> tuple[int, int, bool]:
        """Return rows and nodes that our kernel attends for, and whether vLLM's has to as well."""
        if metadata is None:
            return 0, 0, True
        rows = len(metadata.query_start_loc) - 1
        if self._drafted is None:
            nodes = min(metadata.max_query_len, self._most)
            return rows, nodes, nodes == 1 or metadata.max_query_len > nodes
        last, nodes = self._drafted
        return last, nodes, last < rows or metadata.max_query_len > nodes

    def _attend(
        self,
        impl: Any,
        window: AttentionWindow,
        query: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        output: Tensor,
        rows: int,
        nodes: int,
    ) -> None:
        keys, values = kv_cache[..., : impl.head_size], kv_cache[..., impl.head_size :]
        view = TreeView(metadata.seq_lens, self._positions, self._paths, self._depths, window)
        pages = Pages(
            metadata.query_start_loc[: rows + 1],
            metadata.block_table,
            nodes,
            metadata.max_seq_len,
        )
        attend_pages(query, keys, values, view, impl.scale, output, pages)

    def end(self) -> None:
        """Note that the forward pass of a step is over."""
        self._drafted = None

    def commit(self, batch: Any, counts: Tensor, sources: Tensor) -> None:
        """Move keys and values of accepted paths (see ``requests.Followed``).

        Args:
            batch: vLLM's ``InputBatch`` of the step.
            counts: int32 [B].
            sources: int32 [m].
        """
        rows = len(counts)
        starts = batch.query_start_loc[: rows + 1]
        for alike in self._of_layers():
            slots = self._slots[alike.group]
            move(
                *(alike.caches, alike.like, slots),
                *(starts, batch.cu_num_logits, counts, sources),
            )

    def _of_layers(self) -> list[_Alike]:
        """Return the layers' caches; vLLM allocates them after some steps of its own."""
        context = self._runner.compilation_config.static_forward_context
        first = context[next(iter(self._layers))].kv_cache
        if first is not self._first:
            self._first = first
            kinds: dict[Any, dict[int, Tensor]] = defaultdict(dict)
            for number, group in enumerate(self._runner.kv_cache_config.kv_cache_groups):
                for name in group.layer_names:
                    if name in self._layers:
                        cache = context[name].kv_cache
                        kind = number, cache.shape, cache.stride(), cache.dtype
                        kinds[kind][cache.data_ptr()] = cache
            self._alike = [
                _Alike(kind[0], addresses(list(caches.values())), next(iter(caches.values())))
                for kind, caches in kinds.items()
            ]
        return self._alike

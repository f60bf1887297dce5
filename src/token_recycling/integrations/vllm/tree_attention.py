"""Trees in vLLM on CPUs: the checks for ``mode=tree``, and what differs from a step with chains.

vLLM schedules a tree as a chain of draft tokens. Cache slots remain those of the chain; positions
and masks are those of the tree. After the forward, the accepted path is moved to the front.

vLLM's own kernels support causal masks only. This backend reads the same paged cache: all decoding
requests at once, padded to the longest, and prompts one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from token_recycling.integrations.engines.versions import refuse
from token_recycling.integrations.vllm.step import StepDrafter, drafted

FEW = 128  # queries of a request up to which it is attended to together with others


def check_model(vllm_config: Any) -> None:
    """Check that trees are computed correctly with this model and these settings.

    Raises:
        TokenRecyclingError: they are not; the message says why.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    reasons = {
        "the model uses MLA": model.use_mla,
        "the model uses M-RoPE": model.uses_mrope,
        "the model has layers with recurrent state": model.is_hybrid or model.is_attention_free,
        "pipeline parallelism is on": parallel.pipeline_parallel_size > 1,
        "the cache is quantised": vllm_config.cache_config.cache_dtype not in ("auto", "float32"),
    }
    refuse("mode=tree cannot be used: {}; use mode=chain", reasons)


def register() -> None:
    """Replace vLLM's CPU attention backend by this one, in this process."""
    name = f"{_TreeBackend.__module__}.{_TreeBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, name)


def place(runner: Any, proposer: StepDrafter, metadata: Any) -> None:
    """Set each node's position from its depth, and pass the trees to the builders of metadata.

    Args:
        runner: vLLM's model runner after preparing its inputs, which are modified in place.
        proposer: its drafter, with the trees.
        metadata: vLLM's draft metadata; None: there are no drafts.
    """
    trees: list[Tensor | None] = []
    if rows := drafted(runner, metadata):
        begins = _first_tokens(runner, metadata)
        draft = proposer.requests.drafts(slots_of(runner, proposer, rows))
        counts = [metadata.num_draft_tokens[row] + 1 for row in rows]
        owner = torch.repeat_interleave(torch.tensor(counts))
        nodes = torch.cat([torch.arange(count) for count in counts])
        first = torch.tensor([begins[row] for row in rows])[owner]
        positions = runner.positions
        positions[first + nodes] = positions[first] + draft.depths[owner, nodes]
        trees = [None] * len(begins)
        for i, (row, count) in enumerate(zip(rows, counts)):
            trees[row] = draft.ancestors[i, :count, :count]
    for group in chain.from_iterable(runner.attn_groups):
        group.get_metadata_builder().trees = trees


def keep_paths(runner: Any, metadata: Any, paths: list[list[int]]) -> None:
    """Copy the cache entries of each path's nodes to the slots right after its root.

    Args:
        runner: vLLM's model runner.
        metadata: vLLM's draft metadata.
        paths: nodes of each row, the root first.
    """
    moves = [
        (begin + node, begin + to)
        for begin, nodes in zip(_first_tokens(runner, metadata), paths)
        for to, node in enumerate(nodes)
        if to != node
    ]
    if not moves:
        return
    layers = runner.compilation_config.static_forward_context
    moved = set()
    groups = runner.kv_cache_config.kv_cache_groups
    for group, table in zip(groups, runner.input_batch.block_table.block_tables):
        source, target = table.slot_mapping.gpu[torch.tensor(moves).T].long()
        for name in group.layer_names:
            cache = layers[name].kv_cache  # [blocks, heads, slots of a block, 2 x size]
            if cache.data_ptr() in moved:  # layers may use the same cache
                continue
            moved.add(cache.data_ptr())
            size = cache.shape[2]
            taken = cache[source // size, :, source % size]
            cache[target // size, :, target % size] = taken


def _first_tokens(runner: Any, metadata: Any) -> list[int]:
    """Return the index of each row's root among the tokens of the batch."""
    ends = runner.query_start_loc.np[1 : len(metadata.num_draft_tokens) + 1].tolist()
    return [end - drafts - 1 for end, drafts in zip(ends, metadata.num_draft_tokens)]


def slots_of(runner: Any, proposer: StepDrafter, rows: list[int]) -> Tensor:
    """Return the request slots of ``rows``, int64."""
    names = runner.input_batch.req_ids
    return torch.tensor([proposer.slot(names[row]) for row in rows], device="cpu")


class _TreeMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Adds a step's trees to its attention metadata."""

    trees: list[Tensor | None] = []

    def build(self, *args: Any, **options: Any) -> Any:
        """Build vLLM's metadata and attach ``trees``."""
        metadata = super().build(*args, **options)
        metadata.trees, metadata.parts = self.trees, None
        return metadata


class _TreeAttention(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attends to prefixes and trees. Each cache slot is a key followed by its value."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        kinds = {
            "ALiBi": self.alibi_slopes is not None,
            "a logits soft cap": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            f"{self.attn_type} attention": self.attn_type != "decoder",
        }
        refuse("mode=tree cannot be used: the model uses {}; use mode=chain", kinds)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values [t, heads, size] to their slots."""
        size = kv_cache.shape[2]
        entries = torch.cat([key, value], dim=-1)[: len(slot_mapping)]
        kv_cache[slot_mapping // size, :, slot_mapping % size] = entries.to(kv_cache.dtype)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *others: Any,
        **more: Any,
    ) -> Tensor:
        """Write the attention output of ``query`` [t, heads, size] to ``output``."""
        if attn_metadata is None:  # warm-up
            return output
        if attn_metadata.parts is None:
            attn_metadata.parts = _parts(attn_metadata, kv_cache.shape[2])
        for part in attn_metadata.parts:
            entries = kv_cache[part.blocks].transpose(1, 2).flatten(2, 3)[:, :, : part.longest]
            keys, values = entries.to(query.dtype).chunk(2, dim=-1)
            attention = scaled_dot_product_attention(
                query[part.tokens].transpose(1, 2),
                keys,
                values,
                attn_mask=part.mask(self.sliding_window),
                scale=self.scale,
                enable_gqa=self.num_heads != self.num_kv_heads,
            )
            rows = output.view(len(output), self.num_heads, -1)
            rows[part.own] = attention.transpose(1, 2)[part.there]
        return output


@dataclass
class _Part:
    """Requests of a step that are attended to together, padded to q queries and L tokens.

    Attributes:
        tokens: int64 [b, q], index of each query among the tokens of the step.
        blocks: int64 [b, blocks of L tokens], in the cache.
        there: bool [b, q], False for padding.
        own: int64 [all queries], ``tokens`` without padding.
        longest: L.
        lengths: tokens of each request.
        queries: queries of each request.
        trees: of each request, ``ancestors`` of its draft or None.
    """

    tokens: Tensor
    blocks: Tensor
    there: Tensor
    own: Tensor
    longest: int
    lengths: list[int]
    queries: list[int]
    trees: list[Tensor | None]
    masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, window: int) -> Tensor:
        """Return the mask [b, 1, q, L] of a layer with this sliding window."""
        if window not in self.masks:
            mask = torch.zeros((*self.tokens.shape, self.longest), dtype=torch.bool)
            mask[:, :, 0] = True  # a row of padding must see something
            for row, (count, length, tree) in enumerate(
                zip(self.queries, self.lengths, self.trees)
            ):
                mask[row, :count, :length] = visible(count, length, tree, window)
            self.masks[window] = mask[:, None]
        return self.masks[window]


def _parts(metadata: Any, slots: int) -> list[_Part]:
    """Divide the requests of a step: those with few queries together, others alone.

    Args:
        metadata: vLLM's, with the step's trees.
        slots: of a block of the cache.
    """
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    queries = [end - begin for begin, end in pairwise(starts)]
    trees = [*metadata.trees, *[None] * (len(lengths) - len(metadata.trees))]
    few = [row for row, count in enumerate(queries) if 0 < count <= FEW]
    groups = [few] if few else []
    groups += [[row] for row, count in enumerate(queries) if count > FEW]
    parts = []
    for rows in groups:
        width, longest = max(queries[row] for row in rows), max(lengths[row] for row in rows)
        counts = torch.tensor([queries[row] for row in rows])[:, None]
        first = torch.tensor([starts[row] for row in rows])[:, None]
        number = torch.arange(width).expand(len(rows), width)
        present = number < counts
        tokens = first + number * present
        blocks = metadata.block_table[rows, : -(-longest // slots)].long()
        parts.append(
            _Part(
                tokens,
                blocks,
                present,
                tokens[present],
                longest,
                [lengths[row] for row in rows],
                [queries[row] for row in rows],
                [trees[row] for row in rows],
            )
        )
    return parts


def visible(queries: int, length: int, tree: Tensor | None, window: int) -> Tensor:
    """Return the mask of the last ``queries`` of ``length`` tokens, bool [q, length].

    Args:
        queries: number of tokens in this step.
        length: total number of tokens.
        tree: ancestors of the last n tokens, bool [n, n]; None: no tree.
        window: tokens visible to each token, itself included; negative: unlimited.
    """
    positions = torch.arange(length)
    mask = positions <= positions[length - queries :, None]
    if tree is not None:
        n = len(tree)
        mask[-n:, -n:] = tree
        positions[-n:] = length - n + tree.sum(dim=1) - 1
    if window >= 0:
        mask &= positions > positions[length - queries :, None] - window
    return mask


class _TreeBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's CPU attention backend with tree attention."""

    @staticmethod
    def get_impl_cls() -> type[_TreeAttention]:
        """Return the attention implementation."""
        return _TreeAttention

    @staticmethod
    def get_builder_cls() -> type[_TreeMetadataBuilder]:
        """Return the builder of its metadata."""
        return _TreeMetadataBuilder

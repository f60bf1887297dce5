"""vLLM's attention in Triton under the name of its attention for CPUs (see v2_on_cpu.py)."""

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend


class TritonForCpu(TritonAttentionBackend):
    """The backend that a CPU worker finds."""

    @staticmethod
    def get_name():
        return "CPU_ATTN"


def attend_quickly(q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, block_table, **others):
    """vLLM's Triton kernel in PyTorch: causal attention to pages, request by request.

    The interpreter needs most of a minute for what this does in a second.
    """
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(seqused_k[: len(starts) - 1].tolist()):
        begin, end = starts[row : row + 2]
        if begin == end:
            continue
        pages = block_table[row, : -(-length // k.shape[1])].long()
        keys, values = (one[pages].flatten(0, 1)[:length].transpose(0, 1) for one in (k, v))
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril(length - (end - begin))
        out[begin:end] = scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=softmax_scale,
            enable_gqa=True,
        )[0].transpose(0, 1)


def attend_pages_quickly(query, key, value, view, scale, out, pages):
    """Our kernel in PyTorch, query by query: what it reads is what each node follows."""
    starts = pages.starts.tolist()
    out = out.view(*query.shape)
    for row, length in enumerate(view.lengths[: len(starts) - 1].tolist()):
        begin, end = starts[row : row + 2]
        if begin == end or end - begin > pages.most:
            continue
        blocks = pages.blocks[row, : -(-length // key.shape[2])].long()
        keys, values = (one[blocks].transpose(1, 2).flatten(0, 1)[:length] for one in (key, value))
        committed = length - (end - begin)
        mask = torch.zeros(end - begin, length, dtype=torch.bool)
        mask[:, :committed] = True
        for node in range(end - begin):
            path = view.paths[row, node, : view.depths[row, node]].long()
            mask[node, committed + path] = True
        out[begin:end] = scaled_dot_product_attention(
            query[begin:end].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)

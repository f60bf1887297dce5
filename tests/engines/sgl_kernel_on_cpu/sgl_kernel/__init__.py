"""Test fixture: what SGLang asks of its kernels on a CPU, in plain PyTorch (see README.md)."""

from __future__ import annotations

import ctypes

import torch
from torch.nn.functional import scaled_dot_product_attention

_library = torch.library.Library("sgl_kernel", "FRAGMENT")  # so that torch.ops.sgl_kernel exists


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **options):
        raise NotImplementedError(f"sgl_kernel.{name} is not in the test fixture")

    return missing


def assign_extend_cache_locs_cpu(pool, req_to_token, start, end, out, pool_len):
    at = 0
    for request, begin, stop in zip(pool.tolist(), start.tolist(), end.tolist()):
        out[at : at + stop - begin] = req_to_token[request, begin:stop].to(out.dtype)
        at += stop - begin


def assign_req_to_token_pool_cpu(pool, req_to_token, start, end, source, pool_len):
    at = 0
    for request, begin, stop in zip(pool.tolist(), start.tolist(), end.tolist()):
        req_to_token[request, begin:stop] = source[at : at + stop - begin].to(req_to_token.dtype)
        at += stop - begin


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, out):
    kept = accept_index.flatten()
    kept = kept[kept >= 0].long()
    out[: len(kept)] = out_cache_loc[kept]


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus, stride):
    rows = torch.arange(len(accept_lens)) * stride
    bonus.copy_(accept_tokens.flatten()[rows + accept_lens.long() - 1])


def copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources):
    """Copy rows of every layer's cache, all read before the first is written."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist()):
        rows = [ctypes.string_at(pointer + row * stride, stride) for row in sources.tolist()]
        for row, content in zip(targets.tolist(), rows):
            ctypes.memmove(pointer + row * stride, content, stride)


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk every request's tree by the target's argmax."""
    for row in range(len(candidates)):
        tokens, child, sibling, chosen, index = (
            tensor[row].tolist()
            for tensor in (
                candidates,
                retrive_next_token,
                retrive_next_sibling,
                target_predict,
                retrive_index,
            )
        )
        node, path = 0, [0]
        while len(path) < accept_index.shape[1]:
            below = child[node]
            while below != -1 and tokens[below] != chosen[node]:
                below = sibling[below]
            if below == -1:
                break
            predicts[index[node]] = chosen[node]
            node = below
            path.append(node)
        predicts[index[node]] = chosen[node]
        accept_token_num[row] = len(path) - 1
        accept_index[row, : len(path)] = torch.tensor([index[n] for n in path])


def _attend(query, keys, values, scale, mask):
    """[t, heads, size] over keys and values [s, KV heads, size], ``mask`` bool [t, s]."""
    return scaled_dot_product_attention(
        *(tensor.transpose(0, 1)[None] for tensor in (query, keys, values)),
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )[0].transpose(0, 1)


def extend_attention_cpu(
    q, k, v, o, k_cache, v_cache, k_scale, v_scale, req_to_token, pool, lengths, new, starts,
    longest, scale, cap, is_cross, window, encoder, sinks, tree_mask, causal,
):  # fmt: skip
    """Attend from several tokens of each request; a tree's mask covers its own nodes alone."""
    assert not cap, "the test fixture caps no scores"
    at = 0
    sizes = zip(pool.tolist(), lengths.tolist(), new.tolist(), starts.tolist())
    for request, length, count, start in sizes:
        slots = req_to_token[request, :length].long()
        mask = torch.ones(count, length, dtype=torch.bool)
        if tree_mask is not None:
            mask[:, length - count :] = tree_mask[at : at + count * count].view(count, -1).bool()
            at += count * count
        elif causal:
            mask = mask.tril(length - count)
        rows = slice(start, start + count)
        o[rows] = _attend(q[rows], k_cache[slots], v_cache[slots], scale, mask).to(o.dtype)


def decode_attention_cpu(
    q, k_cache, v_cache, k_scale, v_scale, o, k, v, slots, scratch, req_to_token, pool, lengths,
    scale, cap, is_cross, window, encoder, sinks,
):  # fmt: skip
    """Attend from one token of each request, after writing its key and value."""
    assert not cap, "the test fixture caps no scores"
    if k is not None:
        k_cache[slots.long()] = k.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[slots.long()] = v.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    for row, (request, length) in enumerate(zip(pool.tolist(), lengths.tolist())):
        seen = req_to_token[request, :length].long()
        mask = torch.ones(1, length, dtype=torch.bool)
        found = _attend(q[row : row + 1], k_cache[seen], v_cache[seen], scale, mask)
        o[row : row + 1] = found.to(o.dtype)


for _name in ("extend_attention_cpu", "decode_attention_cpu"):
    setattr(torch.ops.sgl_kernel, _name, globals()[_name])

"""Conversion of llama2.c's stories260K (shared/data) to Transformers: weights and tokens."""

from __future__ import annotations

import struct

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def load_model(path):
    """Load llama2.c's legacy format: seven int32, then float32 tensors in a fixed order."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, context = struct.unpack("7i", raw[:28])
    values = torch.from_numpy(np.frombuffer(raw, dtype=np.float32, offset=28).copy())
    offset = 0

    def take(*shape):
        nonlocal offset
        size = int(np.prod(shape))
        offset += size
        return values[offset - size : offset].view(*shape)

    size = dim // heads
    embedding = take(vocabulary, dim)
    norm_1 = take(layers, dim)
    q, k, v = (
        take(layers, dim, dim),
        take(layers, kv_heads * size, dim),
        take(layers, kv_heads * size, dim),
    )
    out, norm_2 = take(layers, dim, dim), take(layers, dim)
    gate, down, up = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    norm = take(dim)

    def halves(weight, n):
        """Reorder RoPE pairs: adjacent in llama2.c, half a head apart in Transformers."""
        return weight.view(n, size // 2, 2, dim).transpose(1, 2).reshape(n * size, dim)

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=abs(vocabulary), hidden_size=dim, intermediate_size=hidden,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            max_position_embeddings=context, rms_norm_eps=1e-5, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2,
        )
    ).eval()  # fmt: skip
    state = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": norm,
        "lm_head.weight": embedding,
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        state |= {
            at + "input_layernorm.weight": norm_1[i],
            at + "post_attention_layernorm.weight": norm_2[i],
            at + "self_attn.q_proj.weight": halves(q[i], heads),
            at + "self_attn.k_proj.weight": halves(k[i], kv_heads),
            at + "self_attn.v_proj.weight": v[i],
            at + "self_attn.o_proj.weight": out[i],
            at + "mlp.gate_proj.weight": gate[i],
            at + "mlp.down_proj.weight": down[i],
            at + "mlp.up_proj.weight": up[i],
        }
    model.load_state_dict(state)
    model.generation_config.eos_token_id = None  # llama2.c stops at the next BOS instead
    return model


def load_tokens(path):
    """Read the byte string of every token."""
    raw, tokens, at = path.read_bytes(), [], 4
    while at < len(raw):
        _, length = struct.unpack_from("fi", raw, at)
        tokens.append(raw[at + 8 : at + 8 + length])
        at += 8 + length
    return tokens


def text_of(tokens, ids):
    """Return the text of token ids, with ``<0x0A>`` as a byte and without the leading space."""
    parts = [tokens[i] for i in ids]
    parts = [bytes([int(p[3:5], 16)]) if p.startswith(b"<0x") else p for p in parts]
    return b"".join(parts).decode().removeprefix(" ")

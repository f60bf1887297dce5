"""Writes the bundled model as a GGUF file, as llama.cpp's converter does."""

from __future__ import annotations

import json

import gguf
import numpy as np

from token_recycling import BUNDLED_MODEL


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put the halves of each head side by side: the order of rotary embeddings in GGUF."""
    shape = weight.shape
    return (
        weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )


def write_gguf(
    path,
    model,
    quantisation=gguf.GGMLQuantizationType.F32,
    architecture="llama",
    without=(),
    kinds=None,
    blocks=None,
    parts=None,
):
    """Write ``model`` with the bundled tokenizer, without some parameters.

    ``kinds``: types of single parameters; ``blocks``: the number of layers that it names;
    ``parts``: of how many files it says it is one.
    """
    kinds = kinds or {}
    known = {kind: arch for arch, kind in gguf.MODEL_ARCH_NAMES.items()}
    arch = known.get(architecture, gguf.MODEL_ARCH.LLAMA)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("bundled")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(blocks or config.num_hidden_layers)
    if parts is not None:
        writer.add_uint16("split.count", parts)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = json.loads((BUNDLED_MODEL / "tokenizer.json").read_text("utf-8"))["model"]
    by_id = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(by_id + [f"<unused{i}>" for i in range(config.vocab_size - len(by_id))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["merges"]])
    writer.add_eos_token_id(config.eos_token_id)
    heads = {}
    if architecture in ("llama", "marsupial"):
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        if name in without:
            continue
        weight = parameter.detach().float().numpy()
        stem, _, own = name.rpartition(".")
        part = stem.rpartition(".")[2]
        weight = paired(weight, heads[part]) if part in heads else weight
        if "gemma" in architecture and "norm" in part:
            weight = weight + 1
        written = f"{names.get_name(stem)}.{own}"
        if weight.ndim == 1:
            writer.add_tensor(written, weight)
        else:
            kind = kinds.get(name, quantisation)
            data = gguf.quants.quantize(weight, kind)
            writer.add_tensor(written, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

"""Writes a GGUF file with random weights of a usual shape, for ``llamacpp.py``: only costs matter.

    python lab/random_gguf.py OUT [--shape 1B] [--kind Q4_K]

Such a model answers with random tokens. Tensors are written one after another, so that a file may
be larger than the memory.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import typer

# hidden size, intermediate size, layers, heads, heads of keys, vocabulary
SHAPES = {
    "1B": (2048, 8192, 16, 32, 8, 32_000),
    "8B": (4096, 14_336, 32, 32, 8, 128_256),
}
# Bytes of a block where its float16 scales are.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
BYTES = 256


def blocks(kind: gguf.GGMLQuantizationType, rows: int, inputs: int, draws: np.random.Generator):
    """Return random blocks [rows, bytes] whose scales are small."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    found = draws.integers(0, BYTES, (rows * inputs // numbers, size), dtype=np.uint8)
    scale = np.float16(0.001 / np.sqrt(inputs))
    for at in SCALES[kind.name]:
        found[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return found.reshape(rows, -1)


def vocabulary(size: int) -> tuple[list[bytes], list[int]]:
    """Return tokens and their types: special ones, bytes, and words without meaning."""
    special = [b"<unk>", b"<s>", b"</s>"]
    tokens = [*special, *(f"<0x{i:02X}>".encode() for i in range(BYTES))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * BYTES]
    words = [f"t{i} ".encode() for i in range(len(tokens), size)]
    return tokens + words, [int(kind) for kind in kinds] + [int(gguf.TokenType.NORMAL)] * len(words)


def main(out: Path, shape: str = "1B", kind: str = "Q4_K") -> None:
    """Write the file."""
    hidden, middle, layers, heads, key_heads, size = SHAPES[shape]
    quantisation = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(f"random {shape}")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(middle)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(size)
    tokens, kinds = vocabulary(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    keys = hidden // heads * key_heads
    matrices = {"token_embd": (size, hidden), "output": (size, hidden)}
    vectors = ["output_norm"]
    for i in range(layers):
        vectors += [f"blk.{i}.attn_norm", f"blk.{i}.ffn_norm"]
        own = {
            "attn_q": (hidden, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (middle, hidden),
            "ffn_up": (middle, hidden),
            "ffn_down": (hidden, middle),
        }
        matrices |= {f"blk.{i}.{name}": shape for name, shape in own.items()}
    numbers, block = gguf.GGML_QUANT_SIZES[quantisation]
    for name, (rows, inputs) in matrices.items():
        writer.add_tensor_info(
            f"{name}.weight",
            (rows, inputs // numbers * block),
            np.dtype(np.uint8),
            rows * inputs // numbers * block,
            raw_dtype=quantisation,
        )
    for name in vectors:
        writer.add_tensor_info(f"{name}.weight", (hidden,), np.dtype(np.float32), 4 * hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draws = np.random.default_rng(0)
    for rows, inputs in matrices.values():
        writer.write_tensor_data(blocks(quantisation, rows, inputs, draws))
    for _ in vectors:
        writer.write_tensor_data(np.ones(hidden, np.float32))
    writer.close()


if __name__ == "__main__":
    typer.run(main)

"""Writes a Llama checkpoint as a GGUF file in one of llama.cpp's 4 or 8 bit formats.

    python lab/quantise.py CHECKPOINT VOCABULARY.gguf OUT.gguf [--kind Q4_K]

The vocabulary and the chat template are those of a GGUF file with the same tokens. With
``widen.py`` that gives a file of the shape of a larger model whose text is real.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import typer
from safetensors import safe_open

PARTS, NUMBERS = 8, 32  # of a Q4_K block, and numbers of a part
SPLIT = 4  # parts whose 6-bit numbers lie whole in a byte
# Keys of the configuration, and what they are called in the header of a GGUF file.
SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "rope.dimension_count",
}


def q4_k(weight: np.ndarray) -> np.ndarray:
    """Return float32 [rows, inputs] in Q4_K, without a search for better scales."""
    parts = weight.reshape(-1, PARTS, NUMBERS)
    low = np.minimum(parts.min(-1), 0)
    step = (parts.max(-1) - low) / 15
    outer = np.stack([step.max(-1), -low.min(-1)], -1) / 63
    outer = outer.astype(np.float16)
    whole = np.where(outer > 0, outer, 1).astype(np.float32)
    scale = np.rint(step / whole[:, :1]).clip(0, 63).astype(np.uint8)
    least = np.rint(-low / whole[:, 1:]).clip(0, 63).astype(np.uint8)
    steps = scale * outer[:, :1].astype(np.float32)
    offsets = least * outer[:, 1:].astype(np.float32)
    divided = (parts + offsets[..., None]) / np.where(steps > 0, steps, 1)[..., None]
    quants = np.rint(divided).clip(0, 15).astype(np.uint8)
    first, second = slice(SPLIT), slice(SPLIT, None)
    scales = np.concatenate(
        [
            scale[:, first] | (scale[:, second] >> 4) << 6,
            least[:, first] | (least[:, second] >> 4) << 6,
            (scale[:, second] & 15) | (least[:, second] & 15) << 4,
        ],
        -1,
    )
    nibbles = quants[:, ::2] | quants[:, 1::2] << 4
    blocks = [outer.view(np.uint8).reshape(len(parts), -1), scales, nibbles.reshape(len(parts), -1)]
    return np.concatenate(blocks, -1).reshape(len(weight), -1)


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the halves of each head side by side: the order of rotary embeddings in GGUF."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def main(checkpoint: Path, vocabulary: Path, out: Path, kind: str = "Q4_K") -> None:
    """Write the file."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    wanted = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(out, "llama")
    sizes = {f"llama.{name}": config[key] for key, name in SIZES.items()}
    for name, field in gguf.GGUFReader(vocabulary).fields.items():
        if name in sizes:
            writer.add_uint32(name, sizes.pop(name))
        elif not name.startswith("GGUF.") and name != gguf.Keys.General.ARCHITECTURE:
            parts = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], parts)
    if sizes:
        sys.exit(f"{vocabulary} has no {', '.join(sizes)}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                weight = file.get_tensor(name).float()
                stem = name.removesuffix(".weight")
                part = stem.rpartition(".")[2]
                written = f"{names.get_name(stem)}.weight"
                if weight.ndim == 1:
                    writer.add_tensor(written, weight.numpy())
                    continue
                data = (paired(weight, heads[part]) if part in heads else weight).numpy()
                packed = q4_k(data) if kind == "Q4_K" else gguf.quants.quantize(data, wanted)
                writer.add_tensor(written, packed, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    typer.run(main)

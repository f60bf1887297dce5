"""Writes a Llama as a GGUF file in one of llama.cpp's 4 or 8 bit formats.

    python lab/quantise.py checkpoint FOLDER VOCABULARY.gguf OUT.gguf [--kind Q4_K]
    python lab/quantise.py random OUT.gguf [--shape llama-8b] [--kind Q4_K]

A checkpoint gets the vocabulary and the chat template of a GGUF file with the same tokens. With
``widen.py`` that gives a file of the shape of a larger model whose text is real. Random weights of
a usual shape answer with random tokens: only costs matter. Tensors are written one after another,
so that a file may be larger than the memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import typer
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from script import run
from token_recycling.errors import TokenRecyclingError
from widen import SHAPES

app = typer.Typer(pretty_exceptions_enable=False)
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
# Name, shape, and what makes the data
Tensors = list[tuple[str, tuple[int, ...], Callable[[], np.ndarray]]]


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


def blocks(kind: GGMLQuantizationType, rows: int, inputs: int, draws: np.random.Generator):
    """Return random blocks [rows, bytes] whose scales are small."""
    numbers, size = GGML_QUANT_SIZES[kind]
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


def write(writer: GGUFWriter, tensors: Tensors, kind: GGMLQuantizationType) -> None:
    """Write the header, then vectors in float32 and matrices in ``kind``."""
    numbers, size = GGML_QUANT_SIZES[kind]
    for name, shape, _ in tensors:
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            packed = (shape[0], shape[1] // numbers * size)
            writer.add_tensor_info(name, packed, np.dtype(np.uint8), packed[0] * packed[1], kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, make in tensors:
        writer.write_tensor_data(make())
    writer.close()


def names_of(layers: int) -> Callable[[str], str]:
    """Return what gives the name of a Llama's parameter in a GGUF file."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    return lambda name: f"{names.get_name(name.removesuffix('.weight'))}.weight"


@app.command()
def checkpoint(folder: Path, vocabulary: Path, out: Path, kind: str = "Q4_K") -> None:
    """Write a checkpoint."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    wanted, writer = GGMLQuantizationType[kind], GGUFWriter(out, "llama")
    sizes = {f"llama.{name}": config[key] for key, name in SIZES.items()}
    for name, field in gguf.GGUFReader(vocabulary).fields.items():
        if name in sizes:
            writer.add_uint32(name, sizes.pop(name))
        elif not name.startswith("GGUF.") and name != gguf.Keys.General.ARCHITECTURE:
            parts = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], parts)
    if sizes:
        raise TokenRecyclingError(f"{vocabulary} has no {', '.join(sizes)}")
    named = names_of(config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def data(file: Any, name: str) -> np.ndarray:
        weight = file.get_tensor(name).float()
        if weight.ndim == 1:
            return weight.numpy()
        if (part := name.split(".")[-2]) in heads:
            weight = paired(weight, heads[part])
        numbers = weight.numpy()
        return q4_k(numbers) if kind == "Q4_K" else gguf.quants.quantize(numbers, wanted)

    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, "pt"))
            for path in sorted(folder.glob("*.safetensors"))
        ]
        tensors: Tensors = [
            (named(name), tuple(file.get_slice(name).get_shape()), partial(data, file, name))
            for file in files
            for name in file.keys()  # noqa: SIM118 (not a mapping)
        ]
        write(writer, tensors, wanted)


@app.command("random")
def random_weights(out: Path, shape: str = "llama-1b", kind: str = "Q4_K") -> None:
    """Write random weights of a shape that ``widen.py`` knows."""
    wanted, writer, sizes = GGMLQuantizationType[kind], GGUFWriter(out, "llama"), SHAPES[shape]
    writer.add_name(f"random {shape}")
    writer.add_context_length(8192)
    for key, name in SIZES.items():
        writer.add_uint32(f"llama.{name}", sizes[key])
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    size = sizes["vocab_size"]
    tokens, kinds = vocabulary(size)
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    draws = np.random.default_rng(0)

    def data(*one: int) -> np.ndarray:
        return blocks(wanted, *one, draws) if len(one) == 2 else np.ones(one, np.float32)

    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    named = names_of(sizes["num_hidden_layers"])
    write(writer, [(named(n), one, partial(data, *one)) for n, one in shapes.items()], wanted)


if __name__ == "__main__":
    run(app)

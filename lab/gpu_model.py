"""A real model for a GPU machine that has none: packed here, widened to a large shape there.

python lab/gpu_model.py CHECKPOINT QUESTIONS.jsonl OUT    writes OUT/a and OUT/b, 46 MB each

A call of the machine carries 64 MiB, hence two parts. Weights are rounded to 4 bits in blocks of
32, embeddings to 6: a checkpoint that was made from a Q4_1 file stays as it is, up to rounding.
``build`` pads the model to the shape of a large one on the GPU (see ``widen``): the text of a real
small model at the cost of a large one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from script import json_lines, run
from token_recycling.decoding.text import as_conversation, encode
from widen import SHAPES, Shape, _fit, _Plan

BLOCK = 32
BITS, EMBEDDING_BITS = 4, 6
HALVES = ("a", "b")
POSITIONS = 65536  # of a widened model


def _encode(weight: Tensor, bits: int) -> bytes:
    """Return a weight as offsets and steps (float16) and codes of ``bits`` bits per block."""
    blocks = weight.reshape(-1, BLOCK)
    low, high = blocks.aminmax(dim=1, keepdim=True)
    low = low.half().float()
    steps = ((high - low) / (2**bits - 1)).half().float()
    codes = ((blocks - low) / steps.clamp(min=1e-12)).round().clamp(0, 2**bits - 1)
    planes = codes.to(torch.uint8).numpy()[..., None] >> np.arange(bits, dtype=np.uint8) & 1
    scales = torch.cat([low, steps], dim=1).half().numpy()
    return bytes(scales.tobytes() + np.packbits(planes.reshape(-1)).tobytes())


def _decode(data: bytes, shape: list[int], bits: int) -> Tensor:
    blocks = int(np.prod(shape)) // BLOCK
    scales = np.frombuffer(data, np.float16, 2 * blocks).reshape(blocks, 2).astype(np.float32)
    planes = np.unpackbits(np.frombuffer(data, np.uint8, offset=4 * blocks))
    weights = 1 << np.arange(bits, dtype=np.uint8)
    codes = (planes.reshape(blocks, BLOCK, bits) * weights).sum(-1, dtype=np.uint8)
    values = codes.astype(np.float32) * scales[:, 1:] + scales[:, :1]
    return torch.from_numpy(values.reshape(shape))


def _bits(name: str) -> int:
    return EMBEDDING_BITS if "embed" in name else BITS


def pack(checkpoint: Path, questions: Path, out: Path, kinds: int = 12) -> int:
    """Write a Llama's weights, its configuration and one prompt of each kind; return the bytes."""
    config = AutoConfig.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    total = sum(weight.numel() * _bits(name) for name, weight in state.items())
    entries: list[dict[str, Any]] = []
    done = 0
    for half in HALVES:
        (out / half).mkdir(parents=True, exist_ok=True)
        (out / half / "weights.bin").write_bytes(b"")
    for name, weight in state.items():
        half = HALVES[2 * done >= total]
        matrix = weight.ndim == 2
        data = _encode(weight, _bits(name)) if matrix else weight.numpy().tobytes()
        with (out / half / "weights.bin").open("ab") as file:
            file.write(data)
        entries.append({"name": name, "shape": list(weight.shape), "bytes": len(data)})
        done += weight.numel() * _bits(name)
    lines = json_lines(questions)
    first = {line["kind"]: line for line in reversed(lines)}
    chosen = sorted(first.values(), key=lambda line: lines.index(line))[:kinds]
    prompts = [encode(tokenizer, as_conversation(tokenizer, [q["prompt"]], False)) for q in chosen]
    manifest = {
        "config": config.to_dict(),
        "entries": entries,
        "prompts": [{"id": q["id"], "tokens": ids} for q, ids in zip(chosen, prompts)],
    }
    (out / HALVES[-1] / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return sum(path.stat().st_size for path in out.glob("*/*"))


def _unpack(folder: Path, entries: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the weights by name, float32 on the host."""
    data = memoryview(b"".join((folder / half / "weights.bin").read_bytes() for half in HALVES))
    weights: dict[str, Tensor] = {}
    for entry in entries:
        own, data = bytes(data[: entry["bytes"]]), data[entry["bytes"] :]
        if len(entry["shape"]) == 2:
            weights[entry["name"]] = _decode(own, entry["shape"], _bits(entry["name"]))
        else:
            weights[entry["name"]] = torch.frombuffer(bytearray(own), dtype=torch.float32)
    return weights


def build(folder: Path, shape: str | None, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """Return (model, prompts) of a packed model on ``device``.

    Args:
        folder: see ``pack``.
        shape: a name in ``SHAPES`` to widen to; None: as it is.
        dtype: of the weights.
        device: where weights are made.
    """
    manifest = json.loads((folder / HALVES[-1] / "manifest.json").read_text("utf-8"))
    config = AutoConfig.for_model(**manifest["config"])
    weights = _unpack(folder, manifest["entries"])
    kind: torch.dtype = getattr(torch, dtype)
    config.dtype = kind
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if shape is not None:
        small = Shape.parse(config.to_dict(), "the packed model")
        asked = Shape.parse(SHAPES[shape], shape)
        with torch.device(device):
            large = _fit(config, small, asked)
            plan = _Plan(small, large, config.rms_norm_eps, kind)
            for name in vars(large):
                setattr(config, name, getattr(large, name))
            config.rms_norm_eps = plan.eps
            config.max_position_embeddings = POSITIONS
            wide = AutoModelForCausalLM.from_config(config, dtype=kind)
            with torch.no_grad():
                state = wide.state_dict()
                for shard in plan.shards(model):
                    for name, weight in shard.items():
                        state[name].copy_(weight)
        model = wide
    model = model.to(kind).eval()
    ends = manifest["config"]["eos_token_id"]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends)
    return model, manifest["prompts"]


def save_widened(packed: str, shape: str) -> None:
    """Write the widened checkpoint and its prompts to /dev/shm, for engines to load."""
    model, prompts = build(Path(packed), shape, "bfloat16", torch.device("cuda"))
    model.config.eos_token_id, model.config.bos_token_id = 2, 1
    model.save_pretrained("/dev/shm/wide", max_shard_size="4GB")
    Path("/dev/shm/prompts.json").write_text(json.dumps([one["tokens"] for one in prompts]))


def main(checkpoint: Path, questions: Path, out: Path) -> None:
    """Pack a model."""
    print(f"{pack(checkpoint, questions, out):,} bytes")


if __name__ == "__main__":
    run(main)

"""Perplexity of packed weights beside that of the dequantised ones, and how often both agree.

    python lab/perplexity.py FILE --text books.txt.xz [--tokens 20000] [--kinds Q4_0,Q8_0]

Text is read 256 tokens at a time, of which the kernels get 128 at once. ``--kinds`` quantises the
weights of the file anew, to types that the package gguf can write.
"""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Annotated, Any

import gguf
import torch
import typer
from torch.nn.functional import cross_entropy

from token_recycling.checkpoint.load import load_checkpoint
from token_recycling.model.cpu.linear import MOST_TOKENS
from token_recycling.model.cpu.packed import PackedEmbedding, PackedLinear, dequantised

LENGTH = 2 * MOST_TOKENS


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a text, read in parts that the kernels take."""
    cache, found = None, []
    for part in ids.split(MOST_TOKENS):
        output = model(input_ids=part[None], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits[0])
    return torch.cat(found)


def requantised(model: Any, kind: gguf.GGMLQuantizationType) -> None:
    """Quantise the weights of a packed model anew."""
    known: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, (PackedLinear, PackedEmbedding)):
            own = module.weight
            if id(own) not in known:
                size = getattr(module, "in_features", getattr(module, "embedding_dim", 0))
                numbers = dequantised(own, module.ggml_type, size).numpy()
                blocks = torch.from_numpy(gguf.quants.quantize(numbers, kind))
                known[id(own)] = torch.nn.Parameter(blocks, requires_grad=False)
            module.weight, module.ggml_type = known[id(own)], int(kind)


def dense(model: Any) -> Any:
    """Return a copy of a packed model with dequantised weights."""
    with torch.device("meta"):
        found = type(model)(model.config).float().eval()
    weights: dict[str, torch.Tensor] = {}
    packed = {name: one for name, one in model.named_modules() if hasattr(one, "ggml_type")}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = packed.get(name.rpartition(".")[0])
        if module is not None and name.endswith("weight"):
            size = getattr(module, "in_features", getattr(module, "embedding_dim", 0))
            weights[name] = dequantised(module.weight, module.ggml_type, size)
        else:
            weights[name] = parameter.detach()
    found.load_state_dict(weights, assign=True)
    found.model.rotary_emb = model.model.rotary_emb
    return found


def main(
    file: Path,
    text: Annotated[Path, typer.Option(help="plain or .xz")],
    tokens: int = 20_000,
    kinds: str = "",
    threads: int = 2,
) -> None:
    """Measure."""
    torch.set_num_threads(threads)
    data = text.read_bytes()
    raw = (lzma.decompress(data) if text.suffix == ".xz" else data).decode("utf-8")
    for name in kinds.split(","):
        model, tokenizer = load_checkpoint(file, "cpu")
        if name:
            requantised(model, gguf.GGMLQuantizationType[name])
        right = dense(model)
        ids = tokenizer(raw[: 8 * tokens], return_tensors="pt").input_ids[0][:tokens]
        losses, agree, count = torch.zeros(2, dtype=torch.float64), 0, 0
        with torch.inference_mode():
            for part in ids.split(LENGTH):
                if len(part) < 2:
                    continue
                both = [logits(one, part)[:-1].float() for one in (model, right)]
                for i, found in enumerate(both):
                    losses[i] += float(cross_entropy(found, part[1:], reduction="sum"))
                agree += int((both[0].argmax(-1) == both[1].argmax(-1)).sum())
                count += len(part) - 1
        packed, unpacked = (losses / count).exp().tolist()
        print(
            f"{name or file.name}: {count} tokens, perplexity {packed:.4f} packed, {unpacked:.4f}"
            f" dequantised ({100 * (packed / unpacked - 1):+.2f} %), same best token"
            f" {100 * agree / count:.1f} %",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)

"""Widening: a small Llama padded to the shape of a larger one, with the same outputs.

The cost of a step depends on a model's shape; the gain from recycling depends on its text. A
widened checkpoint has the shape of a large model and generates the text of the small one, so both
can be measured together without the large model's weights. All added weights are zero. Where zeros
alone would change the result (the mean in a norm, the scale of attention, the logits of tokens that
the small model does not have), other weights compensate for it, up to rounding.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from script import run
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.errors import TokenRecyclingError, one_line

# Sizes only, with the keys of a Hugging Face config. Qwen's attention biases are omitted.
SHAPES: dict[str, dict[str, int]] = {
    "smollm2-135m": dict(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": dict(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=4864,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    "llama-1b": dict(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "llama-7b": dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        intermediate_size=11008,
        vocab_size=32000,
        tie_word_embeddings=False,
    ),
    "llama-8b": dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        tie_word_embeddings=False,
    ),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Files of a checkpoint that are copied, besides the weights and config.json.
COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
# RoPE types whose frequencies depend only on the position among the head's dimensions.
SPREADABLE_ROPE = ("default", "linear", "llama3")
# A token that the small model does not have gets the logit SILENT / rms of the last hidden state:
# below -50 up to an rms of 327 (the bundled model's is under 100). Representable in float16.
SILENT = -(2.0**14)


@dataclass(frozen=True)
class Shape:
    """The sizes that determine a Llama's cost, named as in a Hugging Face config."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Shape:
        """Read a shape from the values of a Hugging Face config.

        Raises:
            TokenRecyclingError: a size is missing or not a positive integer.
        """
        given = {name: value for name, value in values.items() if value is not None}
        heads = given.get("num_attention_heads")
        if _is_size(heads) and _is_size(given.get("hidden_size")):
            given.setdefault("head_dim", given["hidden_size"] // heads)
        given.setdefault("num_key_value_heads", heads)
        tied = bool(given.get("tie_word_embeddings", False))
        names = [field.name for field in fields(cls) if field.name != "tie_word_embeddings"]
        wrong = [name for name in names if not _is_size(given.get(name))]
        if wrong:
            raise TokenRecyclingError(f"{where}: missing or invalid {', '.join(wrong)}")
        return cls(**{name: given[name] for name in names}, tie_word_embeddings=tied)

    @property
    def group(self) -> int:
        """Number of query heads per key-value head."""
        return self.num_attention_heads // self.num_key_value_heads


@dataclass(frozen=True)
class Widened:
    """What ``widen`` wrote.

    Attributes:
        parameters: number of parameters.
        bytes: size of the parameters.
        differs: descriptions of deviations from the requested shape; usually empty.
    """

    parameters: int
    bytes: int
    differs: list[str]


def widen(small: str | Path, to: str | Path, out: str | Path, *, dtype: str = "float32") -> Widened:
    """Write ``small``, padded to the shape ``to``, as the checkpoint folder ``out``.

    The logits stay the same up to rounding, and tokens that the small model does not have get very
    low logits. ``widened`` in ``config.json`` records source, shape and deviations.

    Args:
        small: folder of a plain Llama (no biases, not quantised), or "bundled".
        to: a name in ``SHAPES`` or the path of a ``config.json``.
        out: a new or empty folder.
        dtype: float32, bfloat16 or float16.

    Raises:
        TokenRecyclingError: an argument cannot be used, the small model does not fit into the
            shape, or ``out`` cannot be written.
    """
    if dtype not in DTYPES:
        raise TokenRecyclingError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    target = Path(out).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise TokenRecyclingError(f"{out} already exists; choose a new folder")
    asked = _read_shape(to)
    source = BUNDLED_MODEL if small == "bundled" else Path(small)
    config = _read_llama(source)
    shape = Shape.parse(config.to_dict(), str(source))
    large = _fit(config, shape, asked)
    differs = [
        f"{field.name} {getattr(large, field.name)} instead of {getattr(asked, field.name)}"
        for field in fields(Shape)
        if getattr(large, field.name) != getattr(asked, field.name)
    ]
    plan = _Plan(shape, large, config.rms_norm_eps, DTYPES[dtype])
    changes = {
        **asdict(large),
        "rms_norm_eps": plan.eps,
        "dtype": dtype,
        "widened": {"from": str(small), "to": str(to), "differs": differs},
    }
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        parameters, size = _write_weights(partial, plan, _load(source))
        _write_remaining(partial, source, changes)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise TokenRecyclingError(
            f"cannot write {out}: {getattr(error, 'strerror', None) or error}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Widened(parameters, size, differs)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read_shape(to: str | Path) -> Shape:
    if str(to) in SHAPES:
        return Shape.parse(SHAPES[str(to)], str(to))
    if not Path(to).is_file():
        raise TokenRecyclingError(
            f"unknown shape {to}; choose one of {', '.join(SHAPES)} or a config.json"
        )
    return Shape.parse(_read_json(Path(to)), str(to))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise TokenRecyclingError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise TokenRecyclingError(f"{path} is not a config: it is not a JSON object")
    return values


def _read_llama(folder: Path) -> Any:
    """Return the configuration of a plain Llama; raise if it has biases or is quantised."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise TokenRecyclingError(f"{folder} is not a checkpoint folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(str(folder))
    except Exception as error:  # a broken configuration may raise anything
        line = one_line(error, 300)
        raise TokenRecyclingError(f"cannot read {folder}: {line}") from error
    plain = config.model_type == "llama" and "LlamaForCausalLM" in (config.architectures or [])
    extras = ("attention_bias", "mlp_bias", "quantization_config")
    if not plain or any(getattr(config, name, None) for name in extras):
        raise TokenRecyclingError(
            f"{folder} is not a plain Llama (LlamaForCausalLM, no biases, not quantised)"
        )
    return config


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    except Exception as error:  # broken weights may raise anything
        line = one_line(error, 300)
        raise TokenRecyclingError(f"cannot load the model {folder}: {line}") from error


def _fit(config: Any, small: Shape, asked: Shape) -> Shape:
    """Return the shape closest to ``asked`` that can hold the small model.

    Raises:
        TokenRecyclingError: there is none.
    """
    for name, least in asdict(small).items():
        # ``_fit_heads`` handles too few key-value heads; tie_word_embeddings is not a size.
        if name in ("num_key_value_heads", "tie_word_embeddings"):
            continue
        if getattr(asked, name) < least:
            raise TokenRecyclingError(
                f"the small model does not fit: its {name} is {least}, "
                f"the shape has {getattr(asked, name)}"
            )
    if asked.head_dim % small.head_dim:
        raise TokenRecyclingError(
            f"the shape's head_dim {asked.head_dim} is not a multiple of {small.head_dim}"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if asked.head_dim > small.head_dim and kind not in SPREADABLE_ROPE:
        raise TokenRecyclingError(
            f"with {kind} RoPE, head_dim cannot change from {small.head_dim} to {asked.head_dim}"
        )
    if asked.vocab_size > small.vocab_size:
        if asked.hidden_size < small.hidden_size + 2:
            raise TokenRecyclingError(
                f"a larger vocabulary needs a hidden_size of {small.hidden_size + 2} or more"
            )
        if config.rms_norm_eps * small.hidden_size < 2**-27:
            raise TokenRecyclingError(
                f"a larger vocabulary needs an rms_norm_eps above {config.rms_norm_eps}"
            )
    heads, kv = _fit_heads(small, asked)
    return replace(
        asked,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        # A separate output matrix costs as much to read as a tied one.
        tie_word_embeddings=asked.tie_word_embeddings and small.tie_word_embeddings,
    )


def _fit_heads(small: Shape, asked: Shape) -> tuple[int, int]:
    """Return the smallest numbers of query and key-value heads that hold the small model's heads.

    Neither is smaller than asked for. Transformers requires that the number of query heads divides
    the hidden size.
    """
    choices = [
        (heads, kv)
        for heads in range(asked.num_attention_heads, asked.hidden_size + 1)
        if asked.hidden_size % heads == 0
        for kv in range(asked.num_key_value_heads, heads + 1)
        if heads % kv == 0 and small.num_key_value_heads * _copies(small.group, heads // kv) <= kv
    ]
    if not choices:
        raise TokenRecyclingError("the shape's attention heads do not fit its hidden_size")
    return min(choices, key=sum)


def _copies(small_group: int, large_group: int) -> int:
    """Return the number of key-value heads needed for one group of the small model."""
    return -(-small_group // large_group)


@dataclass(frozen=True)
class _Place:
    """Position of one small weight within the large weight.

    Attributes:
        shape: of the large weight.
        index: per dimension, the indices that are filled.
        scale: factor applied to the small weight.
        rows: rows taken from the small weight; None takes all.
    """

    shape: tuple[int, ...]
    index: tuple[Tensor, ...]
    scale: float = 1.0
    rows: Tensor | None = None

    def zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.shape, dtype=dtype)

    def fill(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        taken = weight.detach() if self.rows is None else weight.detach()[self.rows]
        large = self.zeros(dtype)
        large[torch.meshgrid(*self.index, indexing="ij")] = (taken.double() * self.scale).to(dtype)
        return large


class _Plan:
    """Positions of all weights in the large model, and the compensating values.

    H0 and H1 are the hidden sizes of the small and the large model. Padding H0 values with H1 - H0
    zeros scales their mean square by H0 / H1, so the weights of the norms are multiplied by
    sqrt(H0 / H1), and eps by H0 / H1.

    If the vocabulary grows, two spare dimensions of the residual hold a constant a for every token
    of the small model. This adds 2 a² / H1 to the mean square, which is subtracted from eps. The
    final norm has the weights 1 / a and -1 / a there. In the output matrix, tokens of the small
    model have the same value in both dimensions (a if tied, else 0), which cancels in their
    logits; other tokens have ``SILENT`` in the first one only, hence the logit ``SILENT`` / rms.
    """

    def __init__(self, small: Shape, large: Shape, eps: float, dtype: torch.dtype) -> None:
        self.small, self.large, self.dtype = small, large, dtype
        h0, h1 = small.hidden_size, large.hidden_size
        # A power of two is exact in every dtype; 2 a² <= eps H0 keeps eps non-negative.
        grows = large.vocab_size > small.vocab_size
        self.constant = 2.0 ** math.floor(math.log2(eps * h0 / 2) / 2) if grows else 0.0
        self.eps = (eps * h0 - 2 * self.constant**2) / h1

        width, vocabulary = torch.arange(h0), torch.arange(small.vocab_size)
        self.table = _Place((large.vocab_size, h1), (vocabulary, width))
        self.norm = _Place((h1,), (width,), math.sqrt(h0 / h1))

        queries, keys, rows = self._heads()
        inner = torch.arange(small.intermediate_size)
        # Compensates for attention's division by sqrt(head_dim).
        sharper = math.sqrt(large.head_dim / small.head_dim)
        q = large.num_attention_heads * large.head_dim
        kv = large.num_key_value_heads * large.head_dim
        i1 = large.intermediate_size
        self.layer = {
            "input_layernorm": self.norm,
            "self_attn.q_proj": _Place((q, h1), (queries, width), sharper),
            "self_attn.k_proj": _Place((kv, h1), (keys, width), rows=rows),
            "self_attn.v_proj": _Place((kv, h1), (keys, width), rows=rows),
            "self_attn.o_proj": _Place((h1, q), (width, queries)),
            "post_attention_layernorm": self.norm,
            "mlp.gate_proj": _Place((i1, h1), (inner, width)),
            "mlp.up_proj": _Place((i1, h1), (inner, width)),
            "mlp.down_proj": _Place((h1, i1), (width, inner)),
        }

    def _heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows of queries and of keys, and the small model's rows for the keys.

        A group larger than the large model's groups is split into several, each with a copy of the
        key-value head.
        """
        small, large = self.small, self.large
        copies = _copies(small.group, large.group)
        head = torch.arange(small.num_attention_heads)
        kv, rank = head // small.group, head % small.group
        queries = (kv * copies + rank // large.group) * large.group + rank % large.group
        keys = torch.arange(small.num_key_value_heads * copies)
        # RoPE rotates dimensions i and i + head_dim / 2 with the frequency
        # theta ** (-2 i / head_dim).
        step = large.head_dim // small.head_dim
        pairs = torch.arange(small.head_dim // 2) * step
        dims = torch.cat((pairs, large.head_dim // 2 + pairs))
        return (
            _flat(queries, large.head_dim, dims),
            _flat(keys, large.head_dim, dims),
            _flat(keys // copies, small.head_dim, torch.arange(small.head_dim)),
        )

    def shards(self, model: Any) -> Iterator[dict[str, Tensor]]:
        """Yield all weights by name: those outside the layers first, then layer by layer."""
        yield self._outside(model)
        for number in range(self.large.num_hidden_layers):
            inside = number < self.small.num_hidden_layers
            yield {
                f"model.layers.{number}.{name}.weight": (
                    place.fill(
                        model.get_submodule(f"model.layers.{number}.{name}").weight, self.dtype
                    )
                    if inside
                    else place.zeros(self.dtype)  # adds nothing to the residual
                )
                for name, place in self.layer.items()
            }

    def _outside(self, model: Any) -> dict[str, Tensor]:
        embedding = self.table.fill(model.model.embed_tokens.weight, self.dtype)
        norm = self.norm.fill(model.model.norm.weight, self.dtype)
        weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm}
        head = embedding
        if not self.large.tie_word_embeddings:
            head = self.table.fill(model.get_output_embeddings().weight, self.dtype)
            weights["lm_head.weight"] = head
        if self.constant:
            spare, known = self.small.hidden_size, self.small.vocab_size
            embedding[:known, spare : spare + 2] = self.constant
            norm[spare], norm[spare + 1] = 1 / self.constant, -1 / self.constant
            head[known:, spare] = SILENT
        return weights


def _flat(heads: Tensor, head_dim: int, dims: Tensor) -> Tensor:
    """Return the row indices [heads * dims] of the given dimensions of the given heads."""
    return (heads[:, None] * head_dim + dims).flatten()


def _write_weights(folder: Path, plan: _Plan, model: Any) -> tuple[int, int]:
    """Write one file per layer to save memory; return the numbers of parameters and bytes."""
    count = plan.large.num_hidden_layers + 1
    files: dict[str, str] = {}
    parameters = size = 0
    for number, weights in enumerate(plan.shards(model), start=1):
        name = f"model-{number:05}-of-{count:05}.safetensors"
        save_file(weights, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(weights, name)
        parameters += sum(weight.numel() for weight in weights.values())
        size += sum(weight.nbytes for weight in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    _write_json(folder / "model.safetensors.index.json", index)
    return parameters, size


def _write_remaining(folder: Path, source: Path, changes: dict[str, Any]) -> None:
    config = _read_json(source / "config.json")
    config.pop("torch_dtype", None)
    _write_json(folder / "config.json", config | changes)
    for pattern in COPIED:
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, folder / path.name)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Pad a small Llama to the shape of a larger one: the same text at the larger model's cost."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("small", help='folder of a plain Llama, or "bundled"')
    parser.add_argument("out", type=Path, help="folder to write; new or empty")
    parser.add_argument("--to", required=True, help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("--dtype", default="float32", help=", ".join(DTYPES))
    asked = parser.parse_args(arguments)
    made = widen(asked.small, asked.to, asked.out, dtype=asked.dtype)
    print(f"wrote {asked.out}: {made.parameters:,} parameters, {made.bytes:,} bytes")
    print(f"differences from the shape of {asked.to}: " + ("; ".join(made.differs) or "none"))


if __name__ == "__main__":
    run(main)

"""Widening: a small Llama padded to the shape of a larger one, with the same outputs.

The cost of a step depends on a model's shape; the gain from recycling depends on its text. A
widened checkpoint has the shape of a large model and generates the text of the small one, so both
can be measured together without the large model's weights. All added weights are zero. Where zeros
alone would change the result (the mean in a norm, the scale of attention, the logits of tokens that
the small model does not have), other weights compensate for it, up to rounding.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from script import run
from skinny_kernels.errors import one_line
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import make_folder_atomically

SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "vocab_size"),
)  # keys of a Hugging Face config
# Qwen's attention biases are omitted.
SHAPES: dict[str, dict[str, int]] = {
    name: dict(zip(SIZES, sizes, strict=True)) | {"tie_word_embeddings": tied}
    for name, tied, *sizes in (
        ("smollm2-135m", True, 576, 30, 9, 3, 64, 1536, 49152),
        ("qwen2.5-0.5b", True, 896, 24, 14, 2, 64, 4864, 151936),
        ("llama-1b", True, 2048, 16, 32, 8, 64, 8192, 128256),
        ("llama-7b", False, 4096, 32, 32, 32, 128, 11008, 32000),
        ("llama-8b", False, 4096, 32, 32, 8, 128, 14336, 128256),
    )
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Files of a checkpoint that are copied, besides the weights and config.json.
COPIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "generation_config.json"),
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
        wrong = [name for name in SIZES if not _is_size(given.get(name))]
        if wrong:
            raise TokenRecyclingError(f"{where}: missing or invalid {', '.join(wrong)}")
        return cls(**{name: given[name] for name in SIZES}, tie_word_embeddings=tied)

    @property
    def group(self) -> int:
        """Number of query heads per key-value head."""
        return self.num_attention_heads // self.num_key_value_heads


class Widened(NamedTuple):
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
    if not target.parent.is_dir():
        raise TokenRecyclingError(f"cannot write {out}: No such file or directory")
    asked = _read_shape(to)
    source = BUNDLED_MODEL if small == "bundled" else Path(small)
    config = _read_llama(source)
    shape = Shape.parse(config.to_dict(), str(source))
    large = _fit(config, shape, asked)
    differs = [
        f"{name} {size} instead of {getattr(asked, name)}"
        for name, size in asdict(large).items()
        if size != getattr(asked, name)
    ]
    plan = _Plan(shape, large, config.rms_norm_eps, DTYPES[dtype])
    changes = {
        **asdict(large),
        "rms_norm_eps": plan.eps,
        "dtype": dtype,
        "widened": {"from": str(small), "to": str(to), "differs": differs},
    }
    model = _opened("load the model", source, AutoModelForCausalLM, dtype=torch.float32)
    made = []

    def fill(folder: Path) -> None:
        try:
            made.extend(_write_weights(folder, plan, model))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        old = _read_json(source / "config.json")
        old.pop("torch_dtype", None)
        _write_json(folder / "config.json", old | changes)
        for path in (path for pattern in COPIED for path in source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)

    make_folder_atomically(target, fill)
    parameters, size = made
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
    if not (folder / "config.json").is_file():
        raise TokenRecyclingError(f"{folder} is not a checkpoint folder: it has no config.json")
    config = _opened("read", folder, AutoConfig)
    plain = config.model_type == "llama" and "LlamaForCausalLM" in (config.architectures or [])
    extras = ("attention_bias", "mlp_bias", "quantization_config")
    if not plain or any(getattr(config, name, None) for name in extras):
        raise TokenRecyclingError(
            f"{folder} is not a plain Llama (LlamaForCausalLM, no biases, not quantised)"
        )
    return config


def _opened(verb: str, folder: Path, kind: Any, **options: Any) -> Any:
    try:
        return kind.from_pretrained(str(folder), **options)
    except Exception as error:  # broken files may raise anything
        raise TokenRecyclingError(f"cannot {verb} {folder}: {one_line(error, 300)}") from error


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
        if heads % kv == 0
        and small.num_key_value_heads * math.ceil(small.group / (heads // kv)) <= kv
    ]
    if not choices:
        raise TokenRecyclingError("the shape's attention heads do not fit its hidden_size")
    return min(choices, key=sum)


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
        copies = math.ceil(small.group / large.group)
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


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def main(
    small: Annotated[str, typer.Argument(help='folder of a plain Llama, or "bundled"')],
    out: Annotated[Path, typer.Argument(help="folder to write; new or empty")],
    to: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}, or a config.json")],
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "float32",
) -> None:
    """Pad a small Llama to the shape of a larger one: the same text at the larger model's cost."""
    made = widen(small, to, out, dtype=dtype)
    print(f"wrote {out}: {made.parameters:,} parameters, {made.bytes:,} bytes")
    print(f"differences from the shape of {to}: " + ("; ".join(made.differs) or "none"))


if __name__ == "__main__":
    run(main)

"""Models from GGUF files whose weights keep the numbers of bits that they have in the file.

Transformers reads the configuration and knows which tensor is which parameter. A tensor stays
packed if it is the weight of a linear layer or of an embedding, and if the conversion of its
architecture does nothing to it but reorder its rows, because a block lies within a row.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from skinny_kernels.errors import CheckpointError
from skinny_kernels.gguf_file import check_gguf, check_whole, listed, read_once
from skinny_kernels.huge_pages import Arena, has_huge_pages
from skinny_kernels.packed import (
    FORMATS,
    PackedEmbedding,
    PackedLinear,
    can_compute,
    filled_up,
    interleaved,
    new_bytes,
)

# Fields of a header with as many values as the vocabulary, which no configuration depends on.
OF_TOKENS = tuple(f"tokenizer.ggml.{name}" for name in ("scores", "token_type", "merges"))
NUMBERS = ("F64", "F32", "F16", "BF16")  # types that are not quantised


class NotPackableError(Exception):
    """The file's weights cannot stay packed; the reason is one line."""


class _Tensor(NamedTuple):
    """A tensor of the file.

    Attributes:
        name: of the parameter.
        data: as it lies in the file.
        ggml_type: ggml's number of its type.
        shape: of its numbers.
    """

    name: str
    data: Any
    ggml_type: int
    shape: tuple[int, ...]


def load_packed(file: Path, **model_options: Any) -> Any:
    """Return a model in evaluation mode with the packed weights of a GGUF file.

    Weights are interleaved as the kernels read them, in huge pages where the system has some.
    Activations, norms and biases are float32.

    Args:
        file: the file.
        **model_options: passed to ``AutoModelForCausalLM.from_config``, such as
            ``attn_implementation``.

    Raises:
        NotPackableError: Transformers' own conversion changes more than the order of rows, no
            kernel of this processor reads the weights, or the architecture is not known here.
        CheckpointError: the file lacks tensors.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = check_types(file)
    new = Arena(sizes).new if has_huge_pages() else new_bytes
    about = _about(file)
    kind = about.pop("model_type")
    config = AutoConfig.for_model(kind, **about)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, **model_options)
    model.name_or_path = str(file)
    packed = 0
    for tensor, order, convert in _tensors(file, model, about):
        module_name, _, parameter_name = tensor.name.rpartition(".")
        module = model.get_submodule(module_name)
        layer = _packed(module, tensor, order, new) if parameter_name == "weight" else None
        if layer is not None:
            model.set_submodule(module_name, layer)
            packed += 1
            continue
        values = torch.from_numpy(np.array(convert(), np.float32))
        expected = getattr(module, parameter_name).shape
        if values.shape != expected:
            raise CheckpointError(
                f"cannot load the model {file}: {tensor.name} is {list(values.shape)} in the file, "
                f"and {list(expected)} by its configuration"
            )
        setattr(module, parameter_name, nn.Parameter(values, requires_grad=False))
    if not packed:
        raise NotPackableError("none of its layers can keep its weights packed")
    _tie(model)
    missing = sorted(name for name, parameter in model.named_parameters() if parameter.is_meta)
    if missing:
        raise CheckpointError(
            f"cannot load the model {file}: it lacks {len(missing)} tensors ({listed(missing)})"
        )
    model.save_pretrained = refuse_to_save
    return model.eval()


def load_gguf(file: str | Path, **model_options: Any) -> Any:
    """Return a model in evaluation mode with the packed weights of a GGUF file, for ``prepare``.

    Its tokenizer: ``AutoTokenizer.from_pretrained(folder, gguf_file=name)``.

    Args:
        file: the file, of one of the architectures that Transformers reads.
        **model_options: see ``load_packed``.

    Raises:
        CheckpointError: it cannot be read, or its weights cannot stay packed.
    """
    path = Path(file).expanduser()
    check_gguf(path)
    with read_once(path):
        check_whole(path)
        try:
            return load_packed(path, **model_options)
        except NotPackableError as error:
            reason = str(error) or "none of its tensors is quantised"
            raise CheckpointError(f"cannot load the model {path}: {reason}") from error


def refuse_to_save(*args: Any, **options: Any) -> None:
    """Raise ``CheckpointError``: in place of ``save_pretrained``, which writes raw blocks."""
    raise CheckpointError(
        "the weights are still those of the GGUF file, which Transformers cannot write; "
        "dequantize them when the file is loaded, or copy the file"
    )


def check_types(file: Path) -> list[int]:
    """Return the bytes that the quantised tensors of a GGUF file take, if kernels read all of them.

    Raises:
        NotPackableError: no tensor is quantised (the message is empty), or one in a way that no
            kernel of this processor reads.
    """
    import gguf

    tensors = gguf.GGUFReader(str(file), "c").tensors
    quantised = [tensor for tensor in tensors if tensor.tensor_type.name not in NUMBERS]
    if not quantised:
        raise NotPackableError("")
    kinds = {tensor.tensor_type for tensor in quantised}
    unread = sorted(kind.name for kind in kinds if not can_compute(int(kind)))
    if unread:
        raise NotPackableError(f"no kernel of this processor reads {listed(unread)}")
    rows = [math.prod(map(int, tensor.shape[1:])) for tensor in quantised]
    return [int(tensor.n_bytes) // n * filled_up(n) for tensor, n in zip(quantised, rows)]


def _about(file: Path) -> dict[str, Any]:
    """Return the configuration that Transformers reads from a GGUF file.

    Raises:
        NotPackableError: this version of Transformers reads it in another way.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loader

    fields = gguf.GGUFReader(str(file), "c").fields
    # The loader takes a second to look at every number of a large vocabulary.
    others = {name: fields.pop(name) for name in OF_TOKENS if name in fields}
    try:
        about: dict[str, Any] = dict(loader.load_gguf_checkpoint(str(file))["config"])
    except (AttributeError, ImportError, KeyError, ValueError) as error:
        raise NotPackableError(f"its architecture is not read packed ({error})") from error
    finally:
        fields.update(others)
    return about


def _tensors(file: Path, model: Any, about: dict[str, Any]) -> Iterator[tuple[_Tensor, Any, Any]]:
    """Yield the tensors of the model, the order of their rows, and what converts their numbers.

    The order is None if the conversion does anything else to them.

    Raises:
        NotPackableError: see ``load_packed``.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loader

    reader = gguf.GGUFReader(str(file), "c")
    try:
        architecture = loader.read_field(reader, "general.architecture")[0]
        processors = loader.TENSOR_PROCESSORS
        processor = processors.get(architecture, loader.TensorProcessor)(config=about)
        names = loader.get_gguf_hf_weights_map(model, processor)
    except (AttributeError, ImportError, KeyError, NotImplementedError, ValueError) as error:
        raise NotPackableError(f"its architecture is not read packed ({error})") from error
    for tensor in reader.tensors:
        if tensor.name not in names:
            continue
        shape = tuple(int(n) for n in reversed(tensor.shape))

        def process(values: Any, name: str = tensor.name) -> Any:
            processed = processor.process(
                weights=values, name=name, tensor_key_mapping=names, parsed_parameters={}
            )
            return None if processed.name != name else processed.weights

        def convert(tensor: Any = tensor, process: Any = process) -> Any:
            values = process(gguf.dequantize(tensor.data, tensor.tensor_type))
            if values is None:
                raise NotPackableError(f"{tensor.name} is converted in a way of its own")
            return values

        yield (
            _Tensor(names[tensor.name], tensor.data, int(tensor.tensor_type), shape),
            _order(process, shape),
            convert,
        )
        _release(reader, tensor)


def _release(reader: Any, tensor: Any) -> None:
    """Let the system take back the memory of a tensor of the file; it is read again if needed."""
    memory: Any = getattr(reader.data, "_mmap", None)
    if hasattr(memory, "madvise"):
        begin = -(-int(tensor.data_offset) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (int(tensor.data_offset) + int(tensor.n_bytes)) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _order(process: Any, shape: tuple[int, ...]) -> Any:
    """Return the order of rows that a conversion makes.

    Returns:
        The numbers of the rows; None if it does anything else.
    """
    if len(shape) != 2:
        return None
    rows = np.repeat(np.arange(shape[0], dtype=np.int64)[:, None], 2, axis=1)
    try:
        processed = process(rows)
    except Exception:  # the conversion needs all columns
        return None
    if (
        processed is None
        or processed.shape != rows.shape
        or (processed[:, 0] != processed[:, 1]).any()
    ):
        return None
    order = processed[:, 0]
    return order if np.array_equal(np.sort(order), rows[:, 0]) else None


def _packed(
    module: Any, tensor: _Tensor, order: Any, new: Callable[..., Tensor]
) -> nn.Module | None:
    """Return a layer that keeps a tensor as it is, or None."""
    if tensor.ggml_type not in FORMATS or getattr(module, "weight", None) is None:
        return None
    if tensor.shape != module.weight.shape or order is None:
        return None
    # Gemma's embedding multiplies what it looks up.
    scaled = type(module).__name__.endswith("TextScaledWordEmbedding")
    if type(module) not in (nn.Linear, nn.Embedding) and not scaled:
        return None
    blocks = torch.from_numpy(tensor.data)
    weight = interleaved(blocks, tensor.ggml_type, torch.from_numpy(order), new)
    outputs, inputs = tensor.shape
    if type(module) is nn.Linear:
        bias = module._parameters.get("bias")
        return PackedLinear(inputs, outputs, weight, tensor.ggml_type, bias)
    scale = float(module.embed_scale) if scaled else 1.0
    return PackedEmbedding(outputs, inputs, weight, tensor.ggml_type, scale)


def _tie(model: Any) -> None:
    """Let the LM head use the table of the embedding if the file has only that."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not head.weight.is_meta:
        return
    if isinstance(table, PackedEmbedding):
        shape = table.embedding_dim, table.num_embeddings
        new = PackedLinear(*shape, table.weight, table.ggml_type, head.bias)
        model.set_output_embeddings(new)
    else:
        head.weight = table.weight

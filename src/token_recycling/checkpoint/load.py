"""Loading of a model and its tokenizer from a checkpoint name, a folder or a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from skinny_kernels import huge_pages
from skinny_kernels.errors import CheckpointError, one_line
from skinny_kernels.gguf_file import (
    HINT,
    check_gguf,
    check_whole,
    find_gguf,
    listed,
    read_once,
)
from skinny_kernels.gpu import adjacent
from token_recycling.checkpoint.gguf_tokenizer import kept_tokenizer
from token_recycling.errors import TokenRecyclingError

BUNDLED_MODEL = Path(__file__).parents[1] / "demo_model"
logger = logging.getLogger(__name__)
DEQUANTISED = "4 bytes for every weight, since they are converted to float32"
PACKED_OPTIONS = ("gguf_file", "attn_implementation")  # of a model with packed weights
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
CONFIG_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "trust_remote_code")
TOKENIZER_OPTIONS = (*CONFIG_OPTIONS, "gguf_file")


def load_checkpoint(
    name_or_path: str | Path | None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    dequantize: bool = False,
    **model_options: Any,
) -> tuple[Any, Any]:
    """Return a model in evaluation mode, and its tokenizer.

    The weights of a GGUF file stay packed on a CPU, unless another dtype than float32 is asked for
    (see ``packed``). On a CPU, weights are copied into huge pages where Linux has them;
    on a GPU, those that are multiplied by the same inputs become adjacent (see ``gpu.adjacent``).

    Args:
        name_or_path: a checkpoint's name or folder, a GGUF file, or a folder with one GGUF file
            and no config.json; None: the small bundled model.
        device: where to put the model; None: an accelerator if there is one, else the CPU. Omit
            it with ``device_map``.
        dtype: None: float32 on a CPU and for the bundled model, else the checkpoint's own.
        dequantize: convert the weights of a GGUF file to ``dtype``.
        **model_options: passed to ``AutoModelForCausalLM.from_pretrained`` unchanged.

    Raises:
        TokenRecyclingError: the checkpoint cannot be loaded, or the device cannot be used.
    """
    path, resolved = resolve(name_or_path)
    options = {**resolved, **model_options}
    if device is None and "device_map" not in options:
        device = _best_device()
    check_device(device)
    on_cpu = device is not None and torch.device(device).type == "cpu"
    if dtype is None:
        dtype = torch.float32 if on_cpu or name_or_path is None else "auto"
    check_dtype(dtype)
    from_gguf = "gguf_file" in options
    location = Path(path, options["gguf_file"]) if from_gguf else path
    # A file on the Hub is not there yet; Transformers fetches it.
    is_file = from_gguf and Path(location).is_file()
    with read_once(Path(location)) if from_gguf else nullcontext():
        model = None
        with errors_of_ours():
            if is_file:
                check_whole(Path(location))
            if is_file and on_cpu and not dequantize and dtype in (torch.float32, "float32"):
                model = _packed(Path(location), model_options)
        if model is None:
            model = _dense(location, path, device, dtype, options)
            if on_cpu:
                huge_pages.move(model.parameters())
            elif model.device.type == "cuda":
                adjacent.move(model)
        return model.eval(), load_tokenizer(name_or_path, **options)


@contextmanager
def errors_of_ours() -> Iterator[None]:
    """Raise ``TokenRecyclingError`` in place of an error about a GGUF file."""
    try:
        yield
    except CheckpointError as error:
        raise TokenRecyclingError(str(error)) from error


class _Planned(NamedTuple):
    """What ``load_checkpoint`` is going to load to a GPU.

    Attributes:
        config: of the model.
        device: where its weights will be.
        dtype: of these.
    """

    config: Any
    device: torch.device
    dtype: torch.dtype


def planned(
    name_or_path: str | Path | None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **model_options: Any,
) -> _Planned | None:
    """Return what ``load_checkpoint`` is going to load with the same arguments.

    Returns:
        None if that is not a checkpoint in Transformers' format whose weights all go to a GPU, or
        if it cannot be read, which ``load_checkpoint`` reports.
    """
    try:
        where = torch.device(device or _best_device())
        if where.type != "cuda" or "device_map" in model_options:
            return None
        from transformers import AutoConfig

        path, resolved = resolve(name_or_path)
        if resolved:
            return None
        used = {name: model_options[name] for name in CONFIG_OPTIONS if name in model_options}
        config = AutoConfig.from_pretrained(path, **used)
        if dtype is None:
            dtype = torch.float32 if name_or_path is None else "auto"
        if dtype == "auto":
            dtype = getattr(config, "dtype", None) or torch.float32
        return _Planned(config, where, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    except Exception as error:  # a broken checkpoint may raise anything
        logger.debug("what will be loaded is not known: %s", one_line(error, 200))
        return None


def check_device(device: str | torch.device | None) -> None:
    """Raise ``TokenRecyclingError`` if a device cannot be used; None: any."""
    if device is None:
        return
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:
        line = str(error).strip().split("\n")[0]
        raise TokenRecyclingError(f"device {device} cannot be used: {line}") from error


def check_dtype(dtype: str | torch.dtype | None) -> None:
    """Raise ``TokenRecyclingError`` if a name of a dtype is not one of ``DTYPES``."""
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise TokenRecyclingError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")


def _packed(file: Path, model_options: dict[str, Any]) -> Any:
    """Return a model with packed weights; None, and a line in the log, if they cannot stay so.

    Raises:
        CheckpointError: the file lacks tensors, or they have other shapes.
    """
    from skinny_kernels.gguf_model import NotPackableError, load_packed

    unknown = [name for name in model_options if name not in PACKED_OPTIONS]
    try:
        if unknown:
            raise NotPackableError(f"{listed(unknown)} cannot be combined with packed weights")
        used = {name: model_options[name] for name in model_options if name != "gguf_file"}
        return load_packed(file, **used)
    except NotPackableError as error:
        reason = str(error)
    except CheckpointError:
        raise
    except Exception as error:  # a broken file, or one that only Transformers' own way reads
        reason = one_line(error, 200)
    if reason:
        logger.warning("%s takes %s: %s", file.name, DEQUANTISED, reason)
    return None


def _dense(
    location: Path | str,
    path: str,
    device: str | torch.device | None,
    dtype: Any,
    options: dict[str, Any],
) -> Any:
    """Load a model with Transformers (see ``load_checkpoint``)."""
    from transformers import AutoModelForCausalLM

    from_gguf = "gguf_file" in options
    remote = is_remote(path)
    try:
        model, about = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **options
        )
        if device is not None and model.device.type != torch.device(device).type:
            model.to(device)  # only if needed: a quantised model may refuse any call of ``to``
    except Exception as error:  # a broken checkpoint may raise anything
        reason = one_line(error, 300)
        if from_gguf:
            reason = f"{HINT} ({reason})"
        elif damaged := _damaged(Path(path)):
            reason = f"{damaged} is truncated or damaged; fetch it again ({reason})"
        line = f"cannot load the model {location}: {reason}"
        if remote:  # the chain of what Transformers tried says no more
            hint = "`token-recycling fetch-model` needs no Hub"
            raise TokenRecyclingError(f"{line.rstrip('.')}; {hint}") from None
        raise TokenRecyclingError(line) from error
    if about["missing_keys"]:  # Transformers would go on with random weights
        missing = sorted(about["missing_keys"])
        raise TokenRecyclingError(
            f"cannot load the model {location}: it lacks {len(missing)} tensors ({listed(missing)})"
        )
    return model


def _damaged(folder: Path) -> str | None:
    """Return the name of a file of weights that cannot be read; None if there is none."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file.name
    return None


def load_tokenizer(name_or_path: str | Path | None, **options: Any) -> Any:
    """Return the tokenizer of a checkpoint, given as in ``load_checkpoint``.

    Args:
        name_or_path: see ``load_checkpoint``.
        **options: those of ``TOKENIZER_OPTIONS`` are passed to ``AutoTokenizer.from_pretrained``.

    Raises:
        TokenRecyclingError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    path, resolved = resolve(name_or_path)
    options = {**resolved, **options}
    used = {name: value for name, value in options.items() if name in TOKENIZER_OPTIONS}

    def load() -> Any:
        return AutoTokenizer.from_pretrained(path, **used)

    file = Path(path, used.get("gguf_file", ""))
    try:
        return kept_tokenizer(file, load) if "gguf_file" in used and file.is_file() else load()
    except Exception as error:  # a broken checkpoint may raise anything
        location = Path(path, used["gguf_file"]) if "gguf_file" in used else path
        line = one_line(error, 300)
        raise TokenRecyclingError(f"cannot load the tokenizer of {location}: {line}") from error


def resolve(name_or_path: str | Path | None) -> tuple[str, dict[str, str]]:
    """Return what Transformers calls the checkpoint: a name or folder, and ``gguf_file`` if needed.

    Args:
        name_or_path: see ``load_checkpoint``.

    Raises:
        TokenRecyclingError: there is no such folder, or its GGUF file cannot be read.
    """
    if name_or_path is None:
        return str(BUNDLED_MODEL), {}
    given = str(name_or_path)
    path = Path(given).expanduser()
    if not given or not path.exists():
        local = given.startswith(("/", ".", "~")) or given.lower().endswith(".gguf")
        if not given or local:
            raise TokenRecyclingError(f"cannot load the model {given!r}: no such file or folder")
        return given, {}
    with errors_of_ours():
        file = find_gguf(path)
        if file is None:
            return str(path), {}
        check_gguf(file)
    return str(file.parent), {"gguf_file": file.name}


def is_remote(name_or_path: str | Path | None) -> bool:
    """Return whether a checkpoint is neither here nor in the cache of the Hugging Face Hub."""
    from huggingface_hub import try_to_load_from_cache

    name, _ = resolve(name_or_path)
    if Path(name).exists():
        return False
    try:
        return not isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # it cannot be a name either
        return False


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"

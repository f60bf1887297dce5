"""Loading of a model and its tokenizer from a checkpoint name or folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from token_recycling.errors import TokenRecyclingError, one_line

BUNDLED_MODEL = Path(__file__).parent / "demo_model"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
TOKENIZER_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "trust_remote_code")


def load_checkpoint(
    name_or_path: str | Path | None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **model_options: Any,
) -> tuple[Any, Any]:
    """Return a model in evaluation mode, and its tokenizer.

    Args:
        name_or_path: a checkpoint; None: the small bundled model.
        device: where to put the model; None: an accelerator if there is one, else the CPU. Omit
            it with ``device_map``.
        dtype: None: float32 on a CPU and for the bundled model, else the checkpoint's own.
        **model_options: passed to ``AutoModelForCausalLM.from_pretrained`` unchanged.

    Raises:
        TokenRecyclingError: the checkpoint cannot be loaded, or the device cannot be used.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(BUNDLED_MODEL if name_or_path is None else name_or_path)
    local = path.startswith(("/", ".", "~")) or Path(path).exists()
    if not path or (local and not Path(path).is_dir()):
        raise TokenRecyclingError(f"cannot load the model {path!r}: no such folder")
    if device is None and "device_map" not in model_options:
        device = _best_device()
    if device is not None:
        try:
            torch.zeros(1, device=device).item()
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            raise TokenRecyclingError(f"device {device} cannot be used: {line}") from error
    on_cpu = device is not None and torch.device(device).type == "cpu"
    if dtype is None:
        dtype = torch.float32 if on_cpu or name_or_path is None else "auto"
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise TokenRecyclingError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **model_options)
        shared = {k: v for k, v in model_options.items() if k in TOKENIZER_OPTIONS}
        tokenizer = AutoTokenizer.from_pretrained(path, **shared)
        if device is not None and model.device.type != torch.device(device).type:
            model.to(device)  # only if needed: a quantised model may refuse any call of ``to``
    except Exception as error:  # a broken checkpoint may raise anything
        line = one_line(error, 300)
        raise TokenRecyclingError(f"cannot load the model {path}: {line}") from error
    return model.eval(), tokenizer


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"

"""Which model a file of warm rows belongs to: names from its weights or its checkpoint files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from token_recycling.model.limits import config_digest

SAMPLES = 64  # elements of each parameter
CHUNKS, CHUNK_BYTES = 16, 512  # read of each checkpoint file


def weights_name(model: Any) -> str | None:
    """Return the name of the files for a model's configuration and weights.

    It depends on ``SAMPLES`` elements of every parameter, rounded to bfloat16: float32 and
    bfloat16 copies of a checkpoint have the same name, other weights have another.

    Returns:
        The name, or None if weights are not in memory or cannot be read element by element.
    """
    digest = hashlib.sha256(config_digest(model.config).encode())
    samples: dict[torch.device, list[Tensor]] = {}
    try:
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                return None
            digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
            flat = parameter.detach().reshape(-1)
            # An odd step, so that the samples of a matrix are not all in one column.
            step = max(1, (flat.numel() // SAMPLES - 1) | 1)
            part = flat[::step][:SAMPLES].to(torch.bfloat16)
            samples.setdefault(part.device, []).append(part)
        for parts in samples.values():
            digest.update(torch.cat(parts).cpu().view(torch.int16).numpy().tobytes())
    except Exception:  # a quantised type may not support any of these operations
        return None
    return f"{type(model).__name__}-{digest.hexdigest()[:16]}"


def checkpoint_folder(source: str, revision: str | None = None) -> Path | None:
    """Return the local folder of a checkpoint, without any download; None if there is none."""
    if not source:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        folder = Path(source).expanduser()
        if folder.is_dir():
            return folder
        found = try_to_load_from_cache(source, "config.json", revision=revision)
    except Exception:  # not a name that the Hub allows
        return None
    return Path(found).parent if isinstance(found, str) else None


def checkpoint_name(folder: Path | None) -> str | None:
    """Return the name of the checkpoint files in ``folder``; None without weights.

    It depends on their names and sizes and on ``CHUNKS`` pieces of each, not on the folder.
    """
    if folder is None:
        return None
    digest = hashlib.sha256()
    try:
        weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
        if not weights:
            return None
        for file in (folder / "config.json", *weights):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as stream:
                for chunk in range(CHUNKS):
                    stream.seek(chunk * max(0, size - CHUNK_BYTES) // (CHUNKS - 1))
                    digest.update(stream.read(CHUNK_BYTES))
    except OSError:
        return None
    return digest.hexdigest()[:16]

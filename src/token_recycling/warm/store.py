"""Files of warm rows in the cache folder, found by a model's weights or by its checkpoint files."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.matrix_file import MatrixFile
from token_recycling.errors import TokenRecyclingError, one_line
from token_recycling.model.limits import config_digest
from token_recycling.util.files import cache_folder, write_text
from token_recycling.warm.context import WarmPrefix

ALIAS_FORMAT = "token-recycling-rows-alias-1"
SAMPLES = 64  # elements of each parameter
CHUNKS, CHUNK_BYTES = 16, 512  # read of each checkpoint file


@dataclass(frozen=True)
class Kept:
    """The contents of a file.

    Attributes:
        rows: the matrix, on the CPU, without rows of pairs.
        context: the tokens that were in front of each token.
        complete: every token was tried; False if the time was used up.
        name: see ``weights_name``.
        path: the file.
    """

    rows: AdjacencyMatrix
    context: WarmPrefix
    complete: bool
    name: str
    path: Path


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


def find(name: str, vocab_size: int, k: int, fingerprint: str = "") -> Kept | None:
    """Return the kept rows with the most tokens and ``k`` candidates or more, cut to ``k``.

    A file that cannot be used gives a warning and is ignored.

    Args:
        name: a result of ``weights_name``.
        vocab_size: of the model.
        k: candidates per token.
        fingerprint: of the model's tokenizer, for the matrix.
    """
    found: list[Kept] = []
    for path in sorted(_folder().glob(f"{name}-k*.safetensors")):
        width = path.stem.rpartition("-k")[2]
        if not (width.isdecimal() and int(width) >= k):
            continue
        try:
            found.append(_load(path, vocab_size, k, fingerprint))
        except TokenRecyclingError as error:
            warnings.warn(f"warm rows are ignored: {error}", stacklevel=2)
    return max(found, key=lambda kept: (kept.complete, kept.rows.rows_seen), default=None)


def keep(name: str, rows: AdjacencyMatrix, context: WarmPrefix, complete: bool) -> Path:
    """Write rows atomically; return the path.

    Raises:
        TokenRecyclingError: the file cannot be written.
    """
    path = _folder() / f"{name}-k{rows.k}.safetensors"
    _make_folder()
    rows.save(
        path,
        {
            "context": context.name,
            "context_tokens": json.dumps(context.tokens),
            "complete": json.dumps(complete),
        },
    )
    return path


def keep_alias(model: Any, name: str) -> None:
    """Make the rows of ``name`` available to engines that load the checkpoint of ``model``.

    Nothing is written for a model that was not loaded from files.

    Raises:
        TokenRecyclingError: the file cannot be written.
    """
    config = model.config
    source = getattr(config, "_name_or_path", "")
    path = _alias(checkpoint_folder(source, getattr(config, "_commit_hash", None)))
    if path is None:
        return
    text = json.dumps({"format": ALIAS_FORMAT, "rows": name}) + "\n"
    try:
        if path.read_text("utf-8") == text:
            return
    except (OSError, ValueError):  # missing or damaged
        pass
    _make_folder()
    write_text(path, text)


def find_by_files(
    source: str, revision: str | None, vocab_size: int, k: int, fingerprint: str = ""
) -> Kept | None:
    """Return the kept rows of a checkpoint, without loading it (see ``find``).

    Args:
        source: a folder or a Hub name.
        revision: of a Hub name; None: the main branch.
        vocab_size: of the model.
        k: candidates per token.
        fingerprint: of the model's tokenizer, for the matrix.
    """
    path = _alias(checkpoint_folder(source, revision))
    if path is None or not path.is_file():
        return None
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != ALIAS_FORMAT or not isinstance(data["rows"], str):
            raise ValueError("another format")
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        warnings.warn(f"warm rows are ignored: {path}: {one_line(error, 80)}", stacklevel=2)
        return None
    return find(data["rows"], vocab_size, k, fingerprint)


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


def _folder() -> Path:
    return cache_folder() / "rows"


def _make_folder() -> None:
    try:
        _folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TokenRecyclingError(f"cannot write {_folder()}: {error.strerror}") from error


def _alias(folder: Path | None) -> Path | None:
    """Return the path of the alias for the checkpoint files in ``folder``, None without weights.

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
    return _folder() / f"alias-{digest.hexdigest()[:16]}.json"


def _load(path: Path, vocab_size: int, k: int, fingerprint: str) -> Kept:
    """Read a file and cut its rows to ``k`` candidates.

    Raises:
        TokenRecyclingError: the file is damaged, or belongs to another vocabulary.
    """
    file = MatrixFile.read(path)
    try:
        context = WarmPrefix(
            file.about["context"], tuple(map(int, json.loads(file.about["context_tokens"])))
        )
        complete = json.loads(file.about["complete"]) is True
        if not all(0 <= token < vocab_size for token in context.tokens):
            raise ValueError("context outside the vocabulary")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise TokenRecyclingError(f"{path} is damaged ({one_line(error, 80)})") from error
    rows = AdjacencyMatrix.of(file)
    rows.check(vocab_size, "", what="this model")
    # Not compared: ids depend on the weights, which another tokenizer does not change.
    rows.fingerprint = fingerprint
    return Kept(rows.cut(k), context, complete, path.stem.rpartition("-k")[0], path)

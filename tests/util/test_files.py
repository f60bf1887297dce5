"""Files: written whole, with the mode and the links they had; damaged ones cost one line."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import token_recycling
from architectures import make
from models import plain, random_prompts
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.matrix_file import FORMAT
from token_recycling.drafting.templates import TreeTemplate
from token_recycling.integrations.engines.options import ServingOptions, load_tokenizer
from token_recycling.util.files import cache_folder, write_text

[PROMPT] = random_prompts([12])
POSIX = pytest.mark.skipif(os.name != "posix", reason="needs modes and links")


def matrix():
    made = AdjacencyMatrix(20, 4)
    made.update(torch.tensor([3]), torch.tensor([[1, 2, 3, 4]]))
    return made


@POSIX
class TestWhatAFileWas:
    @pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
    def test_a_new_file_has_the_mode_that_the_umask_leaves(self, tmp_path, mask):
        before = os.umask(mask)
        try:
            matrix().save(tmp_path / "m")
            write_text(tmp_path / "t", "text")
        finally:
            os.umask(before)
        for name in "mt":
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask

    @pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o640])
    def test_a_file_keeps_its_mode(self, tmp_path, mode):
        file = tmp_path / "m"
        matrix().save(file)
        file.chmod(mode)
        matrix().save(file)
        assert stat.S_IMODE(file.stat().st_mode) == mode

    def test_a_link_is_followed(self, tmp_path):
        (tmp_path / "there").mkdir()
        file, link = tmp_path / "there" / "m", tmp_path / "link"
        link.symlink_to(Path("there") / "m")
        for _ in range(2):  # dangling at first
            matrix().save(link)
            assert link.is_symlink()
            assert AdjacencyMatrix.load(file).rows_seen == 1
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "m", "there"]

    def test_what_is_no_file_is_refused_and_stays(self, tmp_path):
        pipe, folder = tmp_path / "pipe", tmp_path / "folder"
        os.mkfifo(pipe)
        folder.mkdir()
        for place in (pipe, folder, "/dev/null", tmp_path / "to the device"):
            if str(place).endswith("device"):
                place.symlink_to("/dev/null")
            before = os.stat(place).st_mode
            with pytest.raises(TokenRecyclingError, match="not a regular file"):
                matrix().save(place)
            assert os.stat(place).st_mode == before

    def test_a_device_node_is_not_replaced(self, tmp_path):
        node = tmp_path / "full"
        try:
            os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        except PermissionError:
            pytest.skip("needs to be root")
        with pytest.raises(TokenRecyclingError, match="not a regular file"):
            matrix().save(node)
        assert stat.S_ISCHR(node.stat().st_mode)


def test_four_threads_save_one_path(tmp_path):
    file, errors = tmp_path / "m", []

    def save():
        try:
            for _ in range(25):
                matrix().save(file)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert AdjacencyMatrix.load(file).rows_seen == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


KILLED = """
import sys, time
from pathlib import Path
from token_recycling.util.files import cache_folder, write_atomically
def write(partial):
    partial.write_text("half of it")
    print("writing", flush=True)
    time.sleep(60)
write_atomically(Path(sys.argv[1]), write)
"""


@POSIX
def test_what_a_killed_save_leaves_is_removed(tmp_path):
    file = tmp_path / "m.safetensors"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, file], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "writing\n"
        # The control: while it is being written, nobody removes it.
        matrix().save(file)
        assert len(list(tmp_path.iterdir())) == 2
        process.send_signal(signal.SIGKILL)
    elsewhere = tmp_path / "other.partial"
    elsewhere.write_text("not ours")
    matrix().save(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.name, "other.partial"]


def test_no_save_makes_a_temporary_file_that_nobody_removes():
    """As ``save_file`` of safetensors does, which a killed process leaves beside the file."""
    sources = Path(token_recycling.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "import save_file" in path.read_text("utf-8")]


def test_what_is_no_path():
    for path in (None, 5):
        for call in (matrix().save, AdjacencyMatrix.load):
            with pytest.raises(TokenRecyclingError):
                call(path)


@pytest.mark.parametrize("name", ["", "x" * 300, "a\0b", "no/such/folder/m"])
def test_names_that_no_file_can_have(tmp_path, name):
    place = f"{tmp_path}/{name}" if name else name
    for call in (
        matrix().save,
        AdjacencyMatrix.load,
        TreeTemplate.load,
        lambda path: TokenRecycling(make("llama"), matrix=path),
    ):
        with pytest.raises(TokenRecyclingError) as caught:
            call(place)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"candidates": torch.tensor(3, dtype=torch.int32)},
        {"probabilities": torch.tensor(0.5, dtype=torch.float16)},
        {"pair_keys": torch.tensor(3)},
        {"pair_candidates": torch.tensor(3, dtype=torch.int32)},
        {"pair_probabilities": torch.tensor(0.5, dtype=torch.float16)},
        {"triple_keys": torch.tensor(3)},
        {"triple_candidates": torch.tensor(3, dtype=torch.int32)},
        {"triple_probabilities": torch.tensor(0.5, dtype=torch.float16)},
        {"weights": torch.tensor(1.0, dtype=torch.float64)},
        {"weights": torch.zeros(60, dtype=torch.float64)},
        {"weights": torch.zeros(12, 5)},
        {"evidence": torch.tensor(1.0)},
        {"evidence": torch.zeros(3, 4)},
        {"candidates": torch.zeros(0, 4, dtype=torch.int32),
         "probabilities": torch.zeros(0, 4, dtype=torch.float16)},
        {"candidates": torch.zeros(20, dtype=torch.int32)},
        {"candidates": None},
    ],
)  # fmt: skip
def test_tensors_of_another_shape(tmp_path, change):
    file = tmp_path / "m"
    made = matrix()
    made.reserve(7, 11)
    made.weights = torch.ones(12, 5, dtype=torch.float64)
    made.save(file)
    tensors = {**load_file(file), **change}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, file, metadata={"format": FORMAT})
    with pytest.raises(TokenRecyclingError) as caught:
        AdjacencyMatrix.load(file)
    assert "\n" not in str(caught.value)


def test_what_an_older_version_learnt_of_overflows_is_left_out(tmp_path):
    """Files of before may hold NaN; with them half of the calls failed."""
    file, model = tmp_path / "m", make("llama")
    recycler = TokenRecycling(model, nodes=8)
    recycler.generate(PROMPT, max_new_tokens=20)
    recycler.matrix.save(file)
    tensors = load_file(file)
    names = ("probabilities", "pair_probabilities", "triple_probabilities", "evidence", "weights")
    for name in names:
        tensors[name][:] = float("nan")
    save_file(tensors, file, metadata={"format": FORMAT})
    again = TokenRecycling(model, nodes=8, matrix=file)
    assert again.generate(PROMPT, max_new_tokens=20).token_ids == plain(model, PROMPT, 20)
    for name in ("all_probabilities", "evidence", "weights"):
        assert getattr(again.matrix, name).isfinite().all(), name


@pytest.mark.parametrize(
    "options, says",
    [
        ({"k": "8"}, "k is '8'"),
        ({"k": 8.0}, "k is 8.0"),
        ({"k": True}, "k is True"),
        ({"k": 0}, "k is 0"),
        ({"matrix": 5}, "matrix is 5"),
    ],
)
def test_wrong_options_of_a_recycler(options, says):
    with pytest.raises(TokenRecyclingError, match=says):
        TokenRecycling(make("llama"), **options)
    TokenRecycling(make("llama"), k=np.int64(4))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"stop": 3}, "stop is 3"),
        ({"stop": [3]}, "stop is"),
        ({"stop": [""]}, "stop is"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": "9"}, "max_new_tokens is '9'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"on_step": 5}, "on_step is 5"),
        ({"generation_config": "abc"}, "refuses"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_wrong_options_of_a_call(bundled, options, says):
    with pytest.raises(TokenRecyclingError, match=says):
        bundled.generate("The king", **options)


@pytest.mark.parametrize("nodes", [1, 100, 200, 256])
def test_drafts_of_up_to_256_nodes(nodes):
    model = make("llama")
    drafter = AdaptiveDrafter(AdjacencyMatrix(96, 8), nodes=nodes)
    assert len(drafter.acceptance) == drafter.nodes == nodes
    assert list(drafter.acceptance) == sorted(drafter.acceptance, reverse=True)
    recycler = TokenRecycling(model, drafter=drafter)
    answer = recycler.generate(PROMPT, max_new_tokens=30)
    assert answer.token_ids == plain(model, PROMPT, 30)


@pytest.mark.parametrize("nodes", [0, 257])
def test_other_sizes_are_refused(nodes):
    with pytest.raises(TokenRecyclingError, match="between 1 and 256"):
        AdaptiveDrafter(AdjacencyMatrix(96, 8), nodes=nodes)


class TestEnginesMatrix:
    def test_a_matrix_of_another_tokenizer_is_refused(self, tmp_path, bundled):
        file, size = tmp_path / "m", bundled.matrix.vocab_size
        asked = []

        def tokenizer():
            asked.append(1)
            return bundled.tokenizer

        options = ServingOptions(matrix=str(file))
        AdjacencyMatrix(size, 8, fingerprint=f"{size}-0123456789abcdef").save(file)
        with pytest.raises(TokenRecyclingError, match="a different tokenizer"):
            options.make(size, 15, tokenizer)
        options.make(size, 15)  # an engine without a tokenizer
        # the control: its own
        AdjacencyMatrix(size, 8, fingerprint=bundled.matrix.fingerprint).save(file)
        options.make(size, 15, tokenizer)
        assert len(asked) == 2
        AdjacencyMatrix(size, 8).save(file)
        options.make(size, 15, tokenizer)  # it does not say of which tokenizer it is
        assert len(asked) == 2

    def test_loading_an_engines_tokenizer(self, bundled):
        from token_recycling import BUNDLED_MODEL

        assert load_tokenizer(None) is None
        assert load_tokenizer(str(BUNDLED_MODEL)).get_vocab() == bundled.tokenizer.get_vocab()
        with pytest.raises(TokenRecyclingError, match="cannot load the tokenizer"):
            load_tokenizer("/no/such/folder")


def test_a_save_does_not_wait_for_others(tmp_path):
    """Many partial files of others in a folder cost little."""
    for i in range(300):
        (tmp_path / f"{i}.partial").touch()
    begin = time.perf_counter()
    matrix().save(tmp_path / "m")
    assert time.perf_counter() - begin < 2


def test_without_a_home_there_is_one_line(monkeypatch):
    for name in ("TOKEN_RECYCLING_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    with pytest.raises(TokenRecyclingError, match="no home folder for a cache; set TOKEN_RECYCL"):
        cache_folder()


@pytest.mark.parametrize("where", ["no home", "unreadable"])
def test_a_recycler_needs_no_cache_folder(bundled, monkeypatch, where):
    """Of a user of a container without a home, or with another user's."""
    for name in ("TOKEN_RECYCLING_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home():
        if where == "no home":
            raise RuntimeError("Could not determine home directory.")
        return Path("/root/\0")  # raises at every look, for root too

    monkeypatch.setattr(Path, "home", home)
    recycler = TokenRecycling(bundled.model, bundled.tokenizer)
    assert recycler.generate("Once upon a time", max_new_tokens=5).token_ids

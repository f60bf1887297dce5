"""GGUF files as checkpoints, and what is wrong with some of them."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import struct

import gguf
import pytest
import torch

from command import call
from gguf_files import write_gguf
from models import plain
from skinny_kernels import gguf_file as reading
from skinny_kernels.gguf_reader import Reader
from token_recycling import TokenRecycling, TokenRecyclingError, load_checkpoint
from token_recycling.checkpoint import load

PROMPT = list(range(40, 60))


@pytest.fixture(scope="module")
def file(bundled, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", bundled.model)


def opened(path, **options):
    return TokenRecycling.from_pretrained(path, device="cpu", nodes=8, **options)


@pytest.mark.parametrize("form", ["file", "folder", "text"])
def test_it_decodes_as_the_checkpoint_it_was_made_from(bundled, file, form):
    recycler = opened({"file": file, "folder": file.parent, "text": str(file)}[form])
    same = dict(bundled.model.named_parameters())
    for name, parameter in recycler.model.named_parameters():
        torch.testing.assert_close(parameter, same[name].float(), rtol=0, atol=0)
    answer = recycler.generate(PROMPT, max_new_tokens=30)
    assert answer.token_ids == plain(bundled.model, PROMPT, 30)
    assert answer.stats.mat > 1
    assert recycler.tokenizer.decode(recycler.tokenizer("The king").input_ids) == "The king"


def test_quantised_weights_are_dequantised_if_asked_for(bundled, tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "q8.gguf", bundled.model, kind)
    recycler = opened(path, dequantize=True)
    weight, original = (
        one.model.layers[0].mlp.up_proj.weight for one in (recycler.model, bundled.model)
    )
    expected = gguf.quants.dequantize(
        gguf.quants.quantize(original.detach().float().numpy(), kind), kind
    )
    assert torch.equal(weight, torch.from_numpy(expected))
    assert not torch.equal(weight, original.float())
    assert recycler.model.dtype == torch.float32
    answer = recycler.generate(PROMPT, max_new_tokens=20)
    assert answer.token_ids == plain(recycler.model, PROMPT, 20)


def test_on_the_command_line(file):
    code, out, _ = call("-m", file, "Once upon a time", "-n", 8, "--raw", "--json")
    assert code == 0
    assert '"token_ids"' in out


def refusal(path):
    with pytest.raises(TokenRecyclingError) as caught:
        opened(path)
    message = str(caught.value)
    assert "\n" not in message
    code, out, err = call("-m", path, "Once upon a time", "-n", 2)
    err = err.replace("\r", "\n").splitlines()  # after a progress bar that tqdm has shown, maybe
    assert (code, out, err[-1]) == (2, "", f"error: {message}")
    return message


def test_several_in_a_folder(file, tmp_path):
    for name in ("a.gguf", "b.GGUF", "c.gguf", "d.gguf"):
        shutil.copy(file, tmp_path / name)
    assert "has 4 GGUF files (a.gguf, b.GGUF, c.gguf and 1 more)" in refusal(tmp_path)


@pytest.mark.parametrize("length", [6, 1000, 200_000, -1000, -1])
def test_cut_short(file, tmp_path, length):
    path, whole = tmp_path / "cut.gguf", file.read_bytes()
    path.write_bytes(whole[:length])
    message = refusal(path)
    if length < 0 or length > 100_000:
        size = len(whole)
        assert f"it is truncated at byte {length % size:,} of {size:,}" in message
    else:
        assert f"it is truncated at byte {length:,}, within its header" in message


def test_a_header_that_is_not_one(file, tmp_path):
    """Random bytes after the magic number: whoever loads it says what is wrong."""
    for seed in range(20):
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(b"GGUF" + random.Random(seed).randbytes(5000))
        refusal(path)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is empty"),
        (b"GGU", "begins with b'GGU' instead of b'GGUF'"),
        (b"hello\n", "begins with b'hell' instead of b'GGUF'"),
    ],
)
def test_another_kind_of_file(tmp_path, content, says):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert f"it is not a GGUF file, as it {says}" in refusal(path)
    other = path.rename(tmp_path / "model.bin")
    assert "give a folder, or a GGUF file" in refusal(other)


def test_none_there(tmp_path):
    assert "no such file or folder" in refusal(tmp_path / "model.gguf")
    assert "no such file or folder" in refusal("model.gguf")


def test_a_part_of_a_split_file(file, tmp_path):
    path = tmp_path / "model-00001-of-00003.gguf"
    shutil.copy(file, path)
    assert "one of several files of a model; merge them" in refusal(path)


def test_a_renamed_part_of_a_split_file(bundled, tmp_path):
    whole = write_gguf(tmp_path / "one.gguf", bundled.model, parts=1)
    assert load_checkpoint(whole, "cpu")
    path = write_gguf(tmp_path / "model.gguf", bundled.model, parts=3)
    assert "model.gguf is one of 3 files of a model; merge them" in refusal(path)


def test_more_layers_than_the_file_names(bundled, tmp_path):
    """Transformers reads the first of them and says nothing."""
    count = bundled.model.config.num_hidden_layers
    path = write_gguf(tmp_path / "model.gguf", bundled.model, blocks=count - 1)
    assert f"tensors of {count} layers, but its block_count is {count - 1}" in refusal(path)


@pytest.mark.skipif(os.name != "posix", reason="named pipes")
@pytest.mark.parametrize("name", ["pipe", "pipe.gguf"])
def test_a_pipe(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert "it is neither a folder nor a regular file" in refusal(tmp_path / name)


def test_an_empty_folder(tmp_path):
    assert "the folder has neither config.json nor a *.gguf file" in refusal(tmp_path)


def test_an_unknown_architecture(bundled, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", bundled.model, architecture="marsupial")
    assert "marsupial" in refusal(path)


def test_an_unknown_quantisation(file, tmp_path):
    data = bytearray(file.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name)  # number of dimensions, their sizes, the type
    (dimensions,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * dimensions, 99)
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert "(99) is not a valid GGMLQuantizationType" in refusal(path)


def test_missing_tensors_are_not_made_up(bundled, tmp_path):
    missing = [f"model.layers.{i}.mlp.up_proj.weight" for i in (2, 3)]
    path = write_gguf(tmp_path / "model.gguf", bundled.model, without=missing)
    assert f"it lacks 2 tensors ({', '.join(missing)})" in refusal(path)


def test_packages_that_are_missing(file, monkeypatch):
    monkeypatch.setattr(
        reading,
        "find_spec",
        lambda name: None if name == "gguf" else importlib.util.find_spec(name),
    )
    message = refusal(file)
    assert "without the packages gguf" in message
    assert "pip install gguf accelerate" in message


def test_the_header_is_what_the_package_gguf_reads(file):
    stock, ours = gguf.GGUFReader(file), Reader(file)
    own = {name for name in stock.fields if not name.startswith("GGUF.")}
    assert set(ours.fields) == own
    for name in own:
        field, right = ours.fields[name], stock.fields[name].contents()
        values = [field.parts[n] for n in field.data]
        assert values == (right if isinstance(right, list) else [right])
    assert [one.name for one in ours.tensors] == [one.name for one in stock.tensors]
    for found, right in zip(ours.tensors, stock.tensors):
        assert found.tensor_type == right.tensor_type
        assert found.data_offset == right.data_offset
        assert (found.shape == right.shape).all()
        assert found.data.dtype == right.data.dtype
        assert (found.data == right.data).all()
    assert ours.end <= file.stat().st_size


@pytest.fixture
def kept(file, tmp_path, monkeypatch):
    """A call that loads the tokenizer of the file, and how often it was built."""
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "cache"))
    built = []
    stock = load.kept_tokenizer

    def counted(path, build):
        return stock(path, lambda: built.append(path) or build())

    monkeypatch.setattr(load, "kept_tokenizer", counted)
    return lambda: load.load_tokenizer(file), built


def test_a_tokenizer_is_built_once(file, kept):
    tokenizer, built = kept
    first, again = tokenizer(), tokenizer()
    assert len(built) == 1
    assert type(first) is type(again)
    assert first.get_vocab() == again.get_vocab()
    assert first.special_tokens_map == again.special_tokens_map
    assert first.chat_template == again.chat_template
    assert first.name_or_path == again.name_or_path
    for text in ("The king is dead.", "  two  spaces\nand a line", "naïve café 東京 🙂"):
        ids = first(text).input_ids
        assert ids == again(text).input_ids
        assert first.decode(ids) == again.decode(ids)


def test_a_damaged_kept_tokenizer_is_built_anew(kept, tmp_path):
    tokenizer, built = kept
    tokenizer()
    (path,) = (tmp_path / "cache").rglob("tokenizer.json")
    path.write_text("{")
    assert tokenizer().get_vocab()
    assert len(built) == 2
    tokenizer()
    assert len(built) == 2


def test_a_tokenizer_that_cannot_be_kept(kept, tmp_path):
    tokenizer, built = kept
    (tmp_path / "cache").write_text("a file")
    assert tokenizer().get_vocab()
    assert tokenizer().get_vocab()
    assert len(built) == 2

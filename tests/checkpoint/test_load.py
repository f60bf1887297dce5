"""Checkpoints that are not whole: one line says so, and nothing is decoded."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from token_recycling import BUNDLED_MODEL, TokenRecycling, TokenRecyclingError


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(BUNDLED_MODEL, tmp_path / "model")


def refusal(folder):
    with pytest.raises(TokenRecyclingError) as caught:
        TokenRecycling.from_pretrained(folder, device="cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_one(folder):
    """The control."""
    assert TokenRecycling.from_pretrained(folder, device="cpu").generate("a", max_new_tokens=2)


def test_tensors_that_are_missing(folder):
    """Transformers goes on with random ones."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    left = {name: tensor for name, tensor in tensors.items() if "layers.2." not in name}
    save_file(left, file, {"format": "pt"})
    missing = len(tensors) - len(left)
    assert f"it lacks {missing} tensors (model.layers.2." in refusal(folder)


def test_more_layers_than_there_are(folder):
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    assert "it lacks 9 tensors" in refusal(folder)


@pytest.mark.parametrize("length", [0, 100, -1000])
def test_weights_that_are_truncated(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert "model.safetensors is truncated or damaged; fetch it again" in refusal(folder)

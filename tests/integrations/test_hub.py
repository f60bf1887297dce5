"""The folder for the Hub: ``custom_generate`` from a repository, here one on disk."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, dynamic_module_utils

from token_recycling import PlainDecodingWarning, TokenRecyclingError, enable
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.integrations.transformers import ATTRIBUTE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "token-recycling"
    command = ["make", "--silent", "hub", f"HUB={out}", "REPOSITORY=org/token-recycling"]
    subprocess.run(command, cwd=ROOT, check=True)
    return out


@pytest.fixture(autouse=True)
def _own_modules(tmp_path, monkeypatch):
    """Transformers copies the code of repositories to a folder of the user."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL, padding_side="left")


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


@pytest.fixture
def ways(repository):
    return {"custom_generate": str(repository), "trust_remote_code": True}


@pytest.fixture
def single(tokenizer):
    return tokenizer("Once upon a time there was a king", return_tensors="pt")


def recycler_of(model):
    return model.__dict__[ATTRIBUTE][1]


def test_the_folder_has_what_the_hub_expects(repository):
    files = {str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()}
    assert files == {
        "README.md",
        "custom_generate/generate.py",
        "custom_generate/requirements.txt",
    }
    card = (repository / "README.md").read_text()
    assert card.startswith("---\n")
    assert "  - custom_generate\n" in card.split("---")[1]
    assert 'custom_generate="org/token-recycling"' in card
    assert "{repository}" not in card


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.8}])
def test_the_text_is_that_of_generate(model, single, ways, options):
    options = options | {"max_new_tokens": 80}
    torch.manual_seed(5)
    expected = model.generate(**single, **options)
    # An automatic size differs from run to run, and so do the accepted tokens.
    ways["token_recycling"] = {"nodes": 24}
    for _ in range(2):
        torch.manual_seed(5)
        assert torch.equal(model.generate(**single, **options, **ways), expected)
    stats = recycler_of(model).stats
    assert stats.new_tokens == 2 * (expected.shape[1] - single["input_ids"].shape[1])
    assert stats.mat > 1.2
    assert "generate" not in model.__dict__


def test_batches_and_streamers(model, tokenizer, ways, capsys):
    batch = tokenizer(["The fox", "Tom has 12 marbles. He"], return_tensors="pt", padding=True)
    expected = model.generate(**batch, max_new_tokens=30)
    assert torch.equal(model.generate(**batch, max_new_tokens=30, **ways), expected)
    one = tokenizer("The fox", return_tensors="pt")
    streamer = TextStreamer(tokenizer)
    model.generate(one["input_ids"], max_new_tokens=30, streamer=streamer, **ways)
    expected = tokenizer.decode(model.generate(**one, max_new_tokens=30)[0])
    assert capsys.readouterr().out.strip() == expected.strip()


def test_options(model, single, ways):
    model.generate(**single, max_new_tokens=5, **ways)
    first = recycler_of(model)
    model.generate(**single, max_new_tokens=5, token_recycling={}, **ways)
    assert recycler_of(model) is first
    model.generate(**single, max_new_tokens=5, token_recycling={"drafter": "paper"}, **ways)
    assert recycler_of(model).drafter.name == "paper"
    with pytest.raises(TokenRecyclingError, match="colour"):
        model.generate(**single, max_new_tokens=5, token_recycling={"colour": 1}, **ways)


def test_what_is_not_recycled_is_said(model, single, ways):
    expected = model.generate(**single, max_new_tokens=10, num_beams=2)
    with pytest.warns(PlainDecodingWarning):
        found = model.generate(**single, max_new_tokens=10, num_beams=2, **ways)
    assert torch.equal(found, expected)
    strict = {"token_recycling": {"strict": True}}
    with pytest.raises(TokenRecyclingError):
        model.generate(**single, max_new_tokens=10, num_beams=2, **strict, **ways)


def test_a_copy_has_a_recycler_of_its_own(model, single, ways):
    expected = model.generate(**single, max_new_tokens=40, **ways)
    twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(**single, max_new_tokens=40, **ways), expected)
    assert recycler_of(twin) is not recycler_of(model)
    assert recycler_of(twin).model is twin


def test_a_version_that_is_not_installed(model, single, repository, tmp_path):
    newer = tmp_path / "newer"
    shutil.copytree(repository, newer)
    (newer / "custom_generate" / "requirements.txt").write_text("token-recycling>=99\n")
    with pytest.raises(ImportError, match="token-recycling>=99"):
        model.generate(**single, custom_generate=str(newer), trust_remote_code=True)


class TestACheckpointWithTheFolder:
    @pytest.fixture
    def loaded(self, repository, tmp_path):
        checkpoint = tmp_path / "checkpoint"
        shutil.copytree(BUNDLED_MODEL, checkpoint)
        shutil.copytree(repository / "custom_generate", checkpoint / "custom_generate")
        return AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, trust_remote_code=True
        ).eval()

    def test_its_generate_recycles(self, loaded, model, single):
        expected = model.generate(**single, max_new_tokens=60)
        assert torch.equal(loaded.generate(**single, max_new_tokens=60), expected)
        assert torch.equal(loaded.generate(single["input_ids"], max_new_tokens=60), expected)
        assert recycler_of(loaded).stats.mat > 1.2

    def test_it_can_be_enabled(self, loaded, model, single):
        expected = model.generate(**single, max_new_tokens=60)
        before = loaded.generate
        with enable(loaded, strict=True) as enabled:
            assert torch.equal(loaded.generate(**single, max_new_tokens=60), expected)
            assert enabled.stats.new_tokens == expected.shape[1] - single["input_ids"].shape[1]
            assert ATTRIBUTE not in loaded.__dict__
        assert loaded.generate is before
        assert torch.equal(loaded.generate(**single, max_new_tokens=60), expected)

    def test_a_generate_from_another_repository_is_not_covered(self, model):
        model.generate = functools.partial(lambda *args, model, **kwargs: "theirs", model=model)
        with warnings.catch_warnings(), pytest.raises(TokenRecyclingError, match="its own"):
            enable(model)

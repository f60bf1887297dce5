"""examples/minimal.py gives the text of ``generate``, in fewer forward passes."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from architectures import make
from models import plain, random_prompts
from token_recycling import AdjacencyMatrix, TreeTemplate

PATH = Path(__file__).parents[2] / "examples" / "minimal.py"


@pytest.fixture
def example():
    spec = spec_from_file_location("minimal", PATH)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text(example, model, prompt, new_tokens, ends=frozenset()):
    matrix = AdjacencyMatrix(model.config.vocab_size, 4)
    tree = example.Tree(TreeTemplate.load("ranked", 4).first(20))
    with torch.inference_mode():
        return example.generate(model, prompt, new_tokens, matrix, tree, set(ends))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("length", [1, 23])
def test_the_text_is_that_of_generate(example, name, length):
    model, (prompt,) = make(name), random_prompts([length])
    found, forwards = text(example, model, prompt, 80)
    assert found == plain(model, prompt, 80)
    assert forwards < 70


@pytest.mark.parametrize("what", ["mask", "positions", "commit", "acceptance"])
def test_breaking_a_part_turns_this_red(example, what, monkeypatch):
    model, (prompt,) = make("llama"), random_prompts([23])
    tree = example.Tree
    forward, commit, accept = example.forward, example.commit, tree.accept

    def broken_forward(model, tokens, cache, depths, visible):
        if what == "mask":
            visible = torch.ones_like(visible)
        return forward(model, tokens, cache, depths + (what == "positions") * depths, visible)

    def broken_commit(cache, length, path):
        commit(cache, length, list(range(len(path))) if what == "commit" else path)

    def broken_accept(self, tokens, choices):
        return accept(self, tokens, tokens[1] + 0 * choices if what == "acceptance" else choices)

    monkeypatch.setattr(example, "forward", broken_forward)
    monkeypatch.setattr(example, "commit", broken_commit)
    monkeypatch.setattr(tree, "accept", broken_accept)
    assert text(example, model, prompt, 80)[0] != plain(model, prompt, 80)


def test_it_ends_where_generate_does(example):
    model, (prompt,) = make("llama"), random_prompts([23])
    whole = plain(model, prompt, 80)
    end = whole[40]
    found, _ = text(example, model, prompt, 80, {end, 10**6})
    assert found == whole[: whole.index(end) + 1]


def test_the_command(example, capsys):
    example.main("Once there was", tree="chain-3", k=2)
    told = capsys.readouterr().out
    assert "100 tokens in" in told


def test_models_with_sliding_windows_are_refused(example, tmp_path):
    make("mistral", sliding_window=16).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="sliding windows"):
        example.main(model=str(tmp_path))


def test_it_stays_minimal():
    assert PATH.read_text("utf-8").count("\n") <= 130

"""A matrix that is taught by the model's answers to generic prompts."""

from itertools import islice

import pytest
import torch

from command import call
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError
from token_recycling.bench.prompts import DEMO
from token_recycling.decoding import teach as module
from token_recycling.decoding.teach import prompts

TOKENS = 300


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 4)
    monkeypatch.setattr(module, "NEW_TOKENS", 40)


def make(bundled, **options):
    return TokenRecycling(bundled.model, bundled.tokenizer, **options)


def test_prompts_differ():
    some = list(islice(prompts(), 400))
    assert len(set(some)) > 300
    assert not any("{" in one for one in some)
    assert some == list(islice(prompts(), 400))


def test_what_is_learnt_is_in_the_matrix(bundled):
    first, second = make(bundled), make(bundled)
    assert first.teach(TOKENS) >= TOKENS
    assert first.matrix.pairs_seen > 50
    assert first.matrix.triples_seen > 50
    assert first.matrix.evidence.sum() > 0
    second.teach(TOKENS)  # the same questions
    for name, tensor in first.matrix.state().items():
        assert torch.equal(tensor, second.matrix.state()[name]), name


def test_it_drafts_better_and_changes_no_text(bundled):
    teacher = make(bundled)
    teacher.teach(6 * TOKENS)
    steps, texts = [], []
    for taught in (False, True):
        answers = []
        for prompt in DEMO[1:6]:
            matrix = teacher.matrix.clone() if taught else None
            recycler = make(bundled, nodes=15, matrix=matrix)
            answers.append(recycler.generate(prompt, max_new_tokens=40))
        steps.append(sum(answer.stats.steps for answer in answers))
        texts.append([answer.token_ids for answer in answers])
    assert texts[0] == texts[1]
    assert steps[1] < 0.95 * steps[0]


def test_the_context_is_kept(bundled):
    recycler = make(bundled)
    ids = recycler.tokenizer("Once upon a time there was a small bird.").input_ids
    first = recycler.generate(ids, max_new_tokens=10, keep_context=True)
    recycler.teach(TOKENS)
    longer = ids + first.token_ids
    again = recycler.generate(longer, max_new_tokens=10, keep_context=True)
    plain = make(bundled, drafter="none").generate(longer, max_new_tokens=10)
    assert again.token_ids == plain.token_ids
    assert again.stats.prompt_tokens < len(longer) // 2  # the others were in the cache


def test_its_time_is_limited(bundled):
    assert 0 < make(bundled).teach(10**6, seconds=0.5) < 10**5


def test_what_cannot_be_taught_is_one_line(bundled):
    with pytest.raises(TokenRecyclingError, match="without a tokenizer"):
        TokenRecycling(bundled.model).teach(TOKENS)
    with pytest.raises(TokenRecyclingError, match="needs the drafter adaptive, not paper"):
        make(bundled, drafter="paper").teach(TOKENS)


@pytest.mark.parametrize("interrupted", [False, True])
def test_only_what_was_learnt_is_written(tmp_path, monkeypatch, interrupted):
    file = tmp_path / "matrix.safetensors"

    def teach(self, *args, **options):
        raise KeyboardInterrupt if interrupted else TokenRecyclingError("no")

    monkeypatch.setattr(TokenRecycling, "teach", teach)
    code, _, err = call("matrix", "teach", file)
    assert code == (130 if interrupted else 2)
    assert file.exists() is interrupted
    assert ("wrote" in err) is interrupted


def test_on_the_command_line(tmp_path):
    file = tmp_path / "matrix.safetensors"
    code, _, err = call("matrix", "teach", file, "--tokens", 100)
    assert code == 0
    assert "tokens have a row" in err
    seen = AdjacencyMatrix.load(file).evidence.sum()
    assert call("matrix", "teach", file, "--tokens", 100)[0] == 0  # it goes on
    assert AdjacencyMatrix.load(file).evidence.sum() > 1.5 * seen
    assert call("Once upon a time", "-n", 20, "--matrix", file)[0] == 0

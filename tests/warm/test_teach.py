"""A matrix that is taught by the model's answers to generic prompts."""

from itertools import islice

import pytest
import torch

from token_recycling import TokenRecycling
from token_recycling.bench.prompts import DEMO
from token_recycling.cli import main
from token_recycling.integrations.engines.options import ServingOptions
from token_recycling.warm import teach as module
from token_recycling.warm.prompts import prompts

TOKENS = 300


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "ROWS", 4)
    monkeypatch.setattr(module, "NEW_TOKENS", 40)


def make(bundled, **options):
    return TokenRecycling(bundled.model, bundled.tokenizer, warm=False, **options)


def test_prompts_differ():
    some = list(islice(prompts(), 400))
    assert len(set(some)) > 300
    assert not any("{" in one for one in some)
    assert some == list(islice(prompts(), 400))


def test_what_is_learnt_is_kept_and_loaded(bundled):
    first = make(bundled)
    found = first.teach(TOKENS)
    assert found.answered >= TOKENS
    assert found.questions % 4 == 0
    assert found.path is not None
    assert first.matrix.pairs_seen > 50
    assert first.matrix.triples_seen > 50
    assert first.matrix.evidence.sum() > 0
    second = TokenRecycling(bundled.model, bundled.tokenizer, warm=None)
    for name, tensor in first.matrix.state().items():
        # rows of tokens may be added at load
        if name in ("keys", "evidence", "weights"):
            assert torch.equal(tensor, second.matrix.state()[name]), name
    assert second.warm_rows.answered == found.answered
    second.generate(DEMO[0], max_new_tokens=20)
    second.reset()
    assert torch.equal(second.matrix.evidence, first.matrix.evidence)


def test_it_drafts_better_and_changes_no_text(bundled):
    cold, taught = (make(bundled, nodes=15) for _ in range(2))
    taught.teach(6 * TOKENS)
    steps, texts = [], []
    for recycler in (cold, taught):
        answers = []
        for prompt in DEMO[1:6]:
            recycler.reset()  # to nothing, or to what was taught
            answers.append(recycler.generate(prompt, max_new_tokens=40))
        steps.append(sum(answer.stats.steps for answer in answers))
        texts.append([answer.token_ids for answer in answers])
    assert texts[0] == texts[1]
    assert steps[1] < 0.95 * steps[0]


def test_it_goes_on_where_it_ended(bundled):
    once, twice = make(bundled), make(bundled)
    once.teach(TOKENS)
    matrix = once.matrix.clone()
    once.teach(TOKENS)  # nothing is left to do
    assert all(
        torch.equal(a, b) for a, b in zip(matrix.state().values(), once.matrix.state().values())
    )
    asked = once.warm_rows.questions
    twice.teach(2 * TOKENS)
    assert twice.warm_rows.questions > asked  # the file of ``once`` was found
    assert twice.warm_rows.answered >= 2 * TOKENS


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
    recycler = make(bundled)
    found = recycler.teach(10**6, seconds=0.5)
    assert 0 < found.answered < 10**5
    assert found.questions >= 4


def test_without_a_tokenizer_nothing_is_done(bundled):
    recycler = TokenRecycling(bundled.model, warm=False)
    assert recycler.teach(TOKENS).answered == 0


def test_engines_start_from_it(bundled, tmp_path):
    recycler = make(bundled)
    recycler.teach(TOKENS)
    folder = bundled.model.config._name_or_path
    drafter = ServingOptions().make(recycler.target.vocab_size, 15, checkpoint=folder)
    assert torch.equal(drafter.matrix.keys, recycler.matrix.keys)
    assert torch.equal(drafter.matrix.weights, recycler.matrix.weights)


def test_on_the_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["warm", "--answers", "100"])
    assert ended.value.code == 0
    assert "taught by" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["warm", "--answers", "-1"])
    assert ended.value.code == 2
    assert "--answers is -1; it must be 0 or more" in capsys.readouterr().err

"""Greedy text is that of ``model.generate``: every architecture, every tree, B = 1 and 5."""

import pytest

from architectures import make
from models import DRAFTS, SUPPORTED, plain, random_prompts
from token_recycling import TokenRecycling

PROMPTS = random_prompts([20, 7, 33, 1, 12])
NEW = 60  # beyond every window (16)
QUICK = ("llama", "gemma3", "gpt2")
MANY = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SUPPORTED]


@pytest.mark.parametrize("name", MANY)
def test_greedy_is_identical(name):
    model = make(name)
    expected = [plain(model, prompt, NEW) for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) > 1  # a constant answer would prove little
    for drafts in DRAFTS:
        recycler = TokenRecycling(model, **drafts, strict=True)
        answers = [recycler.generate(prompt, max_new_tokens=NEW) for prompt in PROMPTS]
        assert [a.token_ids for a in answers] == expected, drafts
        batch = recycler.generate(PROMPTS, max_new_tokens=NEW)
        assert [a.token_ids for a in batch] == expected, f"{drafts}, batch"
        assert sum(a.stats.accepted for a in answers) > 0


@pytest.mark.parametrize("drafter", ["paper", "prompt-lookup", "none"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_other_drafters_are_identical_too(name, drafter):
    model = make(name)
    expected = [plain(model, prompt, NEW) for prompt in PROMPTS]
    recycler = TokenRecycling(model, drafter=drafter, strict=True)
    assert [recycler.generate(p, max_new_tokens=NEW).token_ids for p in PROMPTS] == expected
    assert [a.token_ids for a in recycler.generate(PROMPTS, max_new_tokens=NEW)] == expected


def test_breaking_the_commit_turns_this_red(monkeypatch):
    """The negative control of this file: entries that stay where they were verified."""
    from token_recycling.model.kv_cache import RecyclingCache

    def forgetful(self, path, counts):
        self.lengths = [n + more for n, more in zip(self.lengths, counts, strict=True)]

    model = make("llama")
    expected = [plain(model, prompt, NEW) for prompt in PROMPTS]
    recycler = TokenRecycling(model, nodes=80, strict=True)  # its probe would notice
    monkeypatch.setattr(RecyclingCache, "commit", forgetful)
    found = [recycler.generate(p, max_new_tokens=NEW).token_ids for p in PROMPTS]
    assert found != expected


def test_up_to_the_end_of_the_context():
    """GPT-2 has a table of positions: drafting beyond it must neither fail nor emit."""
    model = make("gpt2", n_positions=64)
    recycler = TokenRecycling(model, nodes=80, strict=True)
    for length in (40, 55, 63):
        prompt = random_prompts([length])[0]
        answer = recycler.generate(prompt, max_new_tokens=100)
        assert answer.token_ids == plain(model, prompt, 64 - length)
        assert answer.finish_reason == "length"

"""The same seed gives the same text as ``model.generate(do_sample=True)``, whatever is drafted."""

import pytest
import torch

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling, TokenRecyclingError

MIXES = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.8, "top_k": 0},
    "min-p": {"temperature": 1.1, "min_p": 0.1},
    "repetition penalty": {"temperature": 0.9, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def model():
    return make("qwen3")


@pytest.fixture(scope="module")
def recycler(model):
    return TokenRecycling(model, nodes=80, strict=True)


@pytest.mark.parametrize("mix", MIXES)
def test_fifty_runs_with_the_same_seeds(model, recycler, mix):
    """Ten seeds for each of five mixes of options."""
    accepted = 0
    for seed in range(10):
        prompt = random_prompts([4 + seed], seed=seed)[0]
        torch.manual_seed(seed)
        expected = plain(model, prompt, 40, do_sample=True, **MIXES[mix])
        answer = recycler.generate(prompt, max_new_tokens=40, seed=seed, **MIXES[mix])
        assert answer.token_ids == expected
        accepted += answer.stats.accepted
    assert accepted > 0


def test_another_seed_gives_another_text(recycler):
    """The negative control: these texts do depend on the random numbers."""
    prompt = random_prompts([5])[0]
    texts = {
        tuple(recycler.generate(prompt, max_new_tokens=30, temperature=1.0, seed=s).token_ids)
        for s in range(5)
    }
    assert len(texts) == 5


def test_pytorchs_own_random_state_without_a_seed(model, recycler):
    prompt = random_prompts([5])[0]
    torch.manual_seed(3)
    expected = plain(model, prompt, 30, do_sample=True, temperature=0.9)
    torch.manual_seed(3)
    assert recycler.generate(prompt, max_new_tokens=30, temperature=0.9).token_ids == expected


def test_row_b_of_a_batch_draws_like_a_single_prompt_with_seed_plus_b(recycler):
    prompts = random_prompts([5, 9, 3])
    options = {"max_new_tokens": 30, "temperature": 0.9}
    batch = recycler.generate(prompts, seed=7, **options)
    single = [recycler.generate(p, seed=7 + b, **options) for b, p in enumerate(prompts)]
    assert [a.token_ids for a in batch] == [a.token_ids for a in single]


def test_greedy_with_processors(model, recycler):
    prompt = random_prompts([6])[0]
    for options in ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}):
        expected = plain(model, prompt, 40, **options)
        assert recycler.generate(prompt, max_new_tokens=40, **options).token_ids == expected
    assert recycler.generate(prompt, max_new_tokens=40).token_ids != expected


def test_the_models_own_generation_config_counts(model, recycler):
    prompt = random_prompts([6])[0]
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.eos_token_id = [11, 12]
    try:
        expected = plain(model, prompt, 40)
        answer = recycler.generate(prompt, max_new_tokens=40)
    finally:
        model.generation_config.repetition_penalty = None
        model.generation_config.eos_token_id = None
    assert answer.token_ids == expected
    assert answer.finish_reason == ("eos" if expected[-1] in (11, 12) else "length")


def test_options_that_transformers_refuses_are_one_line(recycler):
    with pytest.raises(TokenRecyclingError, match=r"top_p is 7\.0"):
        recycler.generate([5, 6], temperature=1.0, top_p=7.0)
    with pytest.raises(TokenRecyclingError, match="refuses") as caught:
        recycler.generate([5, 6], bad_words_ids=[])
    assert "\n" not in str(caught.value)
    with pytest.raises(TokenRecyclingError, match="beam"):
        recycler.generate([5, 6], num_beams=3)

"""What needs a CUDA device; nothing of it has been run where this was written."""

import pytest
import torch

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = random_prompts([20, 7, 33, 1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_captured_step_gives_the_same_text(name):
    model = make(name)
    expected = [plain(model, prompt, 100) for prompt in PROMPTS]
    recycler = TokenRecycling(model.cuda(), tree="ranked-15", strict=True)
    for _ in range(2):
        answers = recycler.generate(PROMPTS, max_new_tokens=100)
        assert [a.token_ids for a in answers] == expected
    (runner,) = recycler._graph._runners.values()
    assert runner._graph is not None


def test_a_step_waits_for_nothing():
    recycler = TokenRecycling(make("llama").cuda(), tree="ranked-15", strict=True)
    recycler.generate(PROMPTS[0], max_new_tokens=5)
    (runner,) = recycler._graph._runners.values()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = runner.launch([False])
        second = runner.launch([False])
        found = [first(), second()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(found) == 2


def test_sampled_text_is_that_of_the_eager_loop():
    model = make("llama").cuda()
    options = {"max_new_tokens": 60, "temperature": 0.9, "seed": 4}
    eager = TokenRecycling(model, tree="ranked-15", graph=False)
    captured = TokenRecycling(model, tree="ranked-15")
    expected = [a.token_ids for a in eager.generate(PROMPTS, **options)]
    assert [a.token_ids for a in captured.generate(PROMPTS, **options)] == expected

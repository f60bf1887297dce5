"""What needs a CUDA device."""

import warnings

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling
from token_recycling.graph import kernels, pool
from token_recycling.graph.captured_step import CapturedStep

PROMPTS = random_prompts([20, 7, 33, 1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_captured_step_gives_the_same_text(name, rows):
    model = make(name)
    prompts = PROMPTS[:rows]
    expected = [plain(model, prompt, 100) for prompt in prompts]
    recycler = TokenRecycling(model.cuda(), nodes=15, strict=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="decoding without a graph")
        for _ in range(2):
            answers = recycler.generate(prompts, max_new_tokens=100)
            assert [a.token_ids for a in answers] == expected
            # Steps are plain until the kernels are compiled.
            recycler.session._graph.pool.wait(60)
    *_, runner = recycler.session._graph.pool._steps.values()  # plain steps before
    assert runner._graph is not None
    assert runner.step._operations is kernels
    assert recycler.stats.accepted > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
@pytest.mark.parametrize("graph", [True, False])
def test_drafts_change_no_token_in_half_precision(dtype, prompts, graph):
    """Logits of this model are so close that a rounding chooses another token."""
    model = make("llama").to(dtype).cuda()

    def texts(**options):
        recycler = TokenRecycling(model, graph=graph, strict=True, **options)
        answers = recycler.generate(prompts, max_new_tokens=150)
        return [answer.token_ids for answer in answers]

    expected = texts(drafter="none")
    for options in ({}, {"nodes": 7}, {"nodes": 15}, {"nodes": 63}, {"drafter": "prompt-lookup"}):
        assert texts(**options) == expected, options


def test_the_host_waits_only_for_the_output():
    recycler = TokenRecycling(make("llama").cuda(), nodes=15, strict=True)
    recycler.generate(PROMPTS[0], max_new_tokens=5)
    (runner,) = recycler.session._graph.pool._steps.values()
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
    eager = TokenRecycling(model, nodes=15, graph=False)
    captured = TokenRecycling(model, nodes=15)
    expected = [a.token_ids for a in eager.generate(PROMPTS, **options)]
    assert [a.token_ids for a in captured.generate(PROMPTS, **options)] == expected


def test_the_matrix_has_learnt_what_the_eager_loop_learns():
    """Up to rounding, and to the tokens of the last steps, which the eager loop does not take."""
    model = make("llama").cuda()
    found = []
    for graph in (True, False):
        recycler = TokenRecycling(model, nodes=15, graph=graph)
        recycler.generate(PROMPTS[2], max_new_tokens=100)
        found.append(recycler.matrix)
    captured, eager = found
    assert captured.rows_seen > 20
    same = (captured.all_candidates == eager.all_candidates).all(dim=1).float().mean()
    assert same > 0.99
    more = captured.evidence.sum(dim=1) / eager.evidence.sum(dim=1)
    assert float(more.min()) > 0.95
    assert float(more.max()) < 1.5


@pytest.mark.parametrize("drafter", ["adaptive", "paper", "prompt-lookup", "none"])
def test_the_host_may_draft_for_a_captured_step(drafter, monkeypatch):
    """As it does for drafters without kernels, and for the default one where these fail."""
    monkeypatch.setattr(pool, "has_device_kernels", lambda device: False)
    model = make("llama")
    prompts = PROMPTS[:2]
    expected = [plain(model, prompt, 60) for prompt in prompts]
    recycler = TokenRecycling(model.cuda(), drafter=drafter, strict=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="decoding without")
        for _ in range(2):
            answers = recycler.generate(prompts, max_new_tokens=60)
            assert [answer.token_ids for answer in answers] == expected
    runners = list(recycler.session._graph.pool._steps.values())
    assert runners
    assert all(runner._graph is not None and runner.lag == 0 for runner in runners)


def test_a_failed_capture_is_one_line_and_the_text_goes_on(monkeypatch):
    model = make("llama")
    expected = plain(model, PROMPTS[0], 40)

    def fails(self):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(CapturedStep, "_capture", fails)
    recycler = TokenRecycling(model.cuda(), nodes=15, strict=True)
    with pytest.warns(UserWarning, match=r"decoding without a graph: .*not permitted") as caught:
        answer = recycler.generate(PROMPTS[0], max_new_tokens=40)
    assert answer.token_ids == expected
    assert "\n" not in str(caught[0].message)

"""What cannot be captured, fails or differs is decoded without a graph."""

import gc
import warnings
from dataclasses import replace

import pytest
import torch
from as_on_a_gpu import on_a_gpu, on_the_host
from graphs import NODES, PROMPTS, recycling, runners

from models import plain
from token_recycling import TokenRecycling, TokenRecyclingError
from token_recycling.errors import GraphError, StepError
from token_recycling.graph import captured_step, pool
from token_recycling.graph.captured_step import CapturedStep
from token_recycling.graph.drafting import HostDrafting
from token_recycling.graph.step import GraphStep, StepSpec


def test_what_a_graph_cannot_hold_is_decoded_without(llama):
    for options in ({"no_repeat_ngram_size": 3}, {"temperature": 0.9, "typical_p": 0.7}):
        recycler = recycling(llama)
        torch.manual_seed(5)
        expected = plain(llama, PROMPTS[0], 30, do_sample="temperature" in options, **options)
        torch.manual_seed(5)
        assert recycler.generate(PROMPTS[0], max_new_tokens=30, **options).token_ids == expected
        assert recycler.session._graph is None


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["paper", "prompt-lookup", "none"])
def test_every_drafter_can_be_part_of_a_graph_on_a_cpu(llama, drafter):
    recycler = recycling(llama, drafter=drafter, nodes=None if drafter == "none" else NODES)
    prompts = [PROMPTS[0], PROMPTS[0][:5] * 3]
    answers = recycler.generate(prompts, max_new_tokens=60)
    assert [a.token_ids for a in answers] == [plain(llama, prompt, 60) for prompt in prompts]
    assert recycler.session._graph is not None
    assert len(runners(recycler)) == 1
    assert (sum(a.stats.accepted for a in answers) > 0) is (drafter != "none")


def test_where_a_step_fails_there_is_a_warning_and_the_same_text(llama, monkeypatch):
    def broken(self):
        raise RuntimeError("no memory for a graph\nmore")

    recycler = recycling(llama)
    monkeypatch.setattr(GraphStep, "run", broken)
    for options in ({}, {"temperature": 0.8, "seed": 2}):
        with pytest.warns(UserWarning, match="without a graph: no memory for a graph more$"):
            answer = recycler.generate(PROMPTS[0], max_new_tokens=40, **options)
        eager = recycling(llama, graph=False)
        expected = eager.generate(PROMPTS[0], max_new_tokens=40, **options)
        assert answer.token_ids == expected.token_ids


class Kernels:
    """Stands in for ``StepKernels``: nothing is compiled."""

    drafts_pending, error = False, None

    def __init__(self, *arguments):
        pass

    def wait_for_steps(self):
        pass

    def check_drafts(self):
        if self.error:
            raise StepError(self.error)


def test_kernels_that_fail_leave_drafting_to_the_host(llama, monkeypatch):
    """The step is still a graph; only for its shape the kernels are not tried again."""
    tried = []

    def step(target, drafter, spec, cache, matrix):
        tried.append((spec.batch, spec.kernels, spec.drafts))
        if spec.kernels and spec.batch == 1:
            raise RuntimeError("ptxas failed\nwith many lines")
        return on_the_host(target, drafter, spec, cache, matrix)

    on_a_gpu(monkeypatch, Kernels, step)
    recycler = recycling(llama)
    with pytest.warns(UserWarning, match="without kernels for drafts: ptxas failed") as caught:
        answer = recycler.generate(PROMPTS[0], max_new_tokens=40)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert answer.token_ids == plain(llama, PROMPTS[0], 40)
    assert answer.stats.accepted > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recycler.generate(PROMPTS[0], max_new_tokens=40).token_ids == answer.token_ids
        recycler.generate(PROMPTS[:2], max_new_tokens=10)
    assert tried == [(1, True, "device"), (1, False, "host"), (2, True, "device")]


def test_steps_are_plain_until_the_kernels_are_compiled(llama, monkeypatch):
    """The answer does not wait, and goes on with drafts if it may become long."""
    used, length = [], 40

    class Compiled(Kernels):
        @property
        def drafts_pending(self):
            return len(used) < 2 and recycler.session._graph is not None and not ready()

    def ready():
        return answered or (emitted and len(emitted) > 10 and length > 150)

    def step(target, drafter, spec, cache, matrix):
        used.append((spec.size, spec.drafts))
        return on_the_host(target, drafter, spec, cache, matrix)

    on_a_gpu(monkeypatch, Compiled, step)
    for length, expected in ((40, [(1, "none")]), (200, [(1, "none"), (NODES + 1, "device")])):
        answered, emitted = False, []
        used.clear()
        recycler = recycling(llama)
        answer = recycler.generate(PROMPTS[0], max_new_tokens=length, on_step=emitted.append)
        assert answer.token_ids == plain(llama, PROMPTS[0], length)
        assert used == expected
        assert (answer.stats.accepted > 0) == (length == 200)
    answered = True
    assert recycler.generate(PROMPTS[0], max_new_tokens=40).stats.accepted > 0


def test_kernels_that_do_not_compile_leave_drafting_to_the_host(llama, monkeypatch):
    class Failing(Kernels):
        error = "no assembler"

    on_a_gpu(monkeypatch, Failing, on_the_host)
    recycler = recycling(llama)
    with pytest.warns(UserWarning, match="without kernels for drafts: no assembler") as caught:
        answer = recycler.generate(PROMPTS[0], max_new_tokens=40)
    assert len(caught) == 1
    assert answer.token_ids == plain(llama, PROMPTS[0], 40)
    assert answer.stats.accepted > 0
    assert [runner.step.drafting.lag for runner in runners(recycler)] == [0]


def test_when_the_next_cache_fails_the_eager_loop_continues(llama, monkeypatch):
    monkeypatch.setattr(pool, "SMALLEST", 64)
    made = CapturedStep.__init__
    count = []

    def once(self, step, memory):
        count.append(step)
        if len(count) > 1:
            raise GraphError("out of memory")
        made(self, step)

    for options in ({}, {"temperature": 0.8, "seed": 2}):
        count.clear()
        recycler = recycling(llama)
        monkeypatch.setattr(CapturedStep, "__init__", once)
        with pytest.warns(UserWarning, match="out of memory"):
            answer = recycler.generate(PROMPTS[0], max_new_tokens=150, **options)
        eager = recycling(llama, graph=False)
        expected = eager.generate(PROMPTS[0], max_new_tokens=150, **options)
        assert answer.token_ids == expected.token_ids
        assert len(count) == 2


def test_what_failed_is_not_tried_again(llama, monkeypatch):
    tried = []

    def failing(self, step, memory):
        tried.append(step)
        raise GraphError("no")

    monkeypatch.setattr(CapturedStep, "__init__", failing)
    recycler = recycling(llama)
    for _ in range(2):
        with pytest.warns(UserWarning, match="without a graph: no"):
            recycler.generate(PROMPTS[0], max_new_tokens=5)
    assert len(tried) == 1


def test_without_memory_it_goes_on_without_a_graph(llama, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(pool, "GraphStep", full)
    recycler = recycling(llama)
    with pytest.warns(UserWarning, match="not enough memory for a cache of 1 x 256 tokens"):
        answer = recycler.generate(PROMPTS[0], max_new_tokens=30)
    assert answer.token_ids == plain(llama, PROMPTS[0], 30)


def _commits_nothing(cache, path, counts):
    cache.lengths.add_(counts)


def _sees_everything(draft):
    draft.ancestors.fill_(True)


def _stands_in_a_row(draft):
    draft.depths.copy_(torch.arange(draft.depths.shape[1]).expand_as(draft.depths))


@pytest.mark.parametrize("what", ["commit", "mask", "positions", "roots"])
def test_breaking_a_part_turns_this_red(llama, monkeypatch, what):
    expected = [plain(llama, prompt, 60) for prompt in PROMPTS]
    recycler = recycling(llama)
    if what == "roots":
        learn = HostDrafting.learn

        def forgets(self, output):
            roots = self._roots
            learn(self, output)
            self._roots = roots

        monkeypatch.setattr(HostDrafting, "learn", forgets)
    elif what == "commit":
        spec = StepSpec(1, 256, 16, kernels=False, drafts="host")
        around = GraphStep(recycler.target, recycler.drafter, spec)._operations
        monkeypatch.setattr(around, "commit", _commits_nothing)
    else:
        breaks = _sees_everything if what == "mask" else _stands_in_a_row
        verify = GraphStep._verify

        def broken(self, draft):
            wrong = replace(draft, ancestors=draft.ancestors.clone(), depths=draft.depths.clone())
            breaks(wrong)
            return verify(self, wrong)

        monkeypatch.setattr(GraphStep, "_verify", broken)
    # An eager step would be just as wrong.
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it must compile, and be wrong
        found = [recycler.generate(p, max_new_tokens=60).token_ids for p in PROMPTS]
    assert found != expected


@pytest.mark.parametrize("sampled", [False, True])
def test_a_graph_that_differs_from_an_eager_step_is_not_used(llama, monkeypatch, sampled):
    options = {"temperature": 0.7, "seed": 3} if sampled else {}
    expected = TokenRecycling(llama, nodes=NODES, graph=False).generate(
        PROMPTS[0], max_new_tokens=30, **options
    )
    run = CapturedStep._run

    def wrong(self):
        output = run(self).clone()
        output[:, 1] = (output[:, 1] + 1) % 5
        return output

    monkeypatch.setattr(CapturedStep, "_run", wrong)
    recycler = recycling(llama, strict=False)
    for _ in range(2):
        with pytest.warns(UserWarning, match="steps of the graph differ"):
            answer = recycler.generate(PROMPTS[0], max_new_tokens=30, **options)
        assert answer.token_ids == expected.token_ids


@pytest.mark.slow
def test_the_check_of_a_graph_leaves_nothing_behind(llama):
    """The matrix is that of a run without the check."""
    matrices = []
    for checks in (True, False):
        recycler = recycling(llama)
        recycler.generate(PROMPTS[0], max_new_tokens=1)
        if not checks:
            recycler.generate(PROMPTS[0], max_new_tokens=30)  # the graph is checked here
            recycler.reset()
            recycler.generate(PROMPTS[0], max_new_tokens=1)
        recycler.generate(PROMPTS[0], max_new_tokens=30)
        matrices.append(recycler.matrix.state())
    assert all(one.equal(other) for one, other in zip(*(m.values() for m in matrices)))


def test_nothing_is_collected_during_a_capture():
    """A graph that is freed meanwhile would end it."""
    assert gc.isenabled()
    with captured_step.uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with captured_step.uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_tensor_parallel_model_falls_back(llama, monkeypatch):
    monkeypatch.setattr(type(llama), "tp_size", 2)
    with pytest.warns(UserWarning, match=r"tensor parallel \(tp_plan\); falling back to standard"):
        recycler = TokenRecycling(llama)
    assert recycler.generate(PROMPTS[0], max_new_tokens=5).stats.drafted == 0
    with pytest.raises(TokenRecyclingError, match="tensor parallel"):
        TokenRecycling(llama, strict=True)

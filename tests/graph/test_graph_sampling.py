"""Sampled text, and processors, in a graph."""

import warnings
from dataclasses import replace

import pytest
import torch
from graphs import NODES, PROMPTS, SAMPLED, recycling, runners
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)

from architectures import make
from models import plain
from token_recycling import enable
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.draft import chains
from token_recycling.graph import chooser, pool
from token_recycling.graph.captured_step import CapturedStep
from token_recycling.graph.chooser import NodeChooser
from token_recycling.model.kv_cache import FixedCache


@pytest.mark.parametrize("mix", SAMPLED)
def test_the_same_seed_draws_the_same_text(mix):
    model = make("qwen3")
    recycler = recycling(model, drafter="paper")
    accepted = 0
    for seed in range(4):
        prompt = PROMPTS[seed]
        torch.manual_seed(seed)
        expected = plain(model, prompt, 40, do_sample=True, **SAMPLED[mix])
        answer = recycler.generate(prompt, max_new_tokens=40, seed=seed, **SAMPLED[mix])
        assert answer.token_ids == expected
        accepted += answer.stats.accepted
    assert accepted > 0
    assert runners(recycler)[0].step.chooser.samples


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Processors see the best tokens only, and tied tokens are sorted by id."""
    init, sort = NodeChooser.__init__, torch.sort

    def cutting(self, *args):
        init(self, *args)
        self._cuts = True

    monkeypatch.setattr(NodeChooser, "__init__", cutting)
    monkeypatch.setattr(torch, "sort", lambda *args, **given: sort(*args, stable=True, **given))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.usefixtures("as_on_cuda")
def test_processors_see_only_the_best_tokens(llama, monkeypatch, ties):
    """If more are tied than are kept, the eager loop decodes; without this the text differs."""
    monkeypatch.setattr(chooser, "MANY", 12)
    model = llama
    if ties:
        model = make("llama")
        with torch.no_grad():  # 16 tokens each have the same logits
            weight = model.lm_head.weight
            weight.copy_(weight[::16].repeat_interleave(16, 0)[: len(weight)])
    options = {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.02}
    left, clear = [], FixedCache.clear
    monkeypatch.setattr(FixedCache, "clear", lambda cache: left.append(1) or clear(cache))

    def same_texts():
        recycler = recycling(model, drafter="paper", nodes=3)
        same = []
        for seed in range(3):
            torch.manual_seed(seed)
            expected = plain(model, PROMPTS[0], 40, do_sample=True, **options)
            answer = recycler.generate(PROMPTS[0], max_new_tokens=40, seed=seed, **options)
            same.append(answer.token_ids == expected)
        return all(same)

    assert same_texts()
    assert bool(left) == ties
    call = NodeChooser.__call__
    if ties:

        def other(self, draft, logits):
            return call(self, draft, logits)[0], torch.zeros((), dtype=torch.bool)

    else:  # the wrong random numbers

        def other(self, draft, logits):
            return call(self, replace(draft, depths=draft.depths + 1), logits)

    monkeypatch.setattr(NodeChooser, "__call__", other)
    assert not same_texts()


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"temperature": 0.8, "top_p": 0.9, "seed": 3}, marks=pytest.mark.slow)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("forgets", [None, "emitted", "prompt"])
def test_a_repetition_penalty_is_part_of_a_graph(llama, monkeypatch, options, forgets):
    """It counts padding, prompt and answer."""
    options = options | {"repetition_penalty": 1.3, "max_new_tokens": 40}
    eager = recycling(llama, graph=False).generate(PROMPTS[:2], **options)
    if forgets == "emitted":
        monkeypatch.setattr(NodeChooser, "advance", lambda self, draft, accepted: None)
    elif forgets == "prompt":
        begin = NodeChooser.begin
        short = [Sequence([1])] * 2
        monkeypatch.setattr(NodeChooser, "begin", lambda self, _, given: begin(self, short, given))
    recycler = recycling(llama)
    answers = recycler.generate(PROMPTS[:2], **options)
    same = [a.token_ids for a in answers] == [a.token_ids for a in eager]
    assert same == (forgets is None)
    assert sum(a.stats.accepted for a in answers) > 0
    step = runners(recycler)[0].step
    assert step.chooser.samples == ("seed" in options)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_repetition_penalty_counts_the_path_to_a_node(forgets):
    """As Transformers' processor does with the text up to each node; 12 has no logits."""
    ancestors = torch.eye(6, dtype=torch.bool)
    for node, parent in enumerate([0, 0, 1, 1, 3, 0]):
        ancestors[node] |= ancestors[parent]
    draft = replace(chains(torch.tensor([[5, 7, 7, 2, 12, 9]])), ancestors=ancestors[None])
    text = [3, 5, 1, 12, 5]
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    logits = torch.randn(1, 6, 12)
    paths = [[], [7], [7, 7], [7, 2], [7, 2, 12], [9]]
    texts = [torch.tensor([[one for one in text + path if one < 12]]) for path in paths]
    expected = [processors(ids, logits[0, [node]]) for node, ids in enumerate(texts)]
    own = NodeChooser([processors], 0, 12, "cpu")
    own.begin([Sequence(text)], [])
    if forgets:
        draft = replace(draft, ancestors=torch.zeros_like(draft.ancestors))
    assert torch.cat(expected).equal(own.penalised(0, draft, logits[0])) != forgets


@pytest.mark.parametrize("cuts", [False, True])
def test_pairs_of_tied_tokens(monkeypatch, request, cuts):
    """Top-p keeps one of two: on a CPU, which one depends on how many tokens it sees."""
    monkeypatch.setattr(chooser, "MANY", 24)
    if cuts:
        request.getfixturevalue("as_on_cuda")
    model = make("llama")
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.copy_(weight[::2].repeat_interleave(2, 0))
    recycler = recycling(model, drafter="paper", nodes=3)
    options = {"temperature": 1.2, "top_k": 12, "top_p": 0.6}
    for seed in range(6):
        torch.manual_seed(seed)
        expected = plain(model, PROMPTS[0], 40, do_sample=True, **options)
        answer = recycler.generate(PROMPTS[0], max_new_tokens=40, seed=seed, **options)
        assert answer.token_ids == expected


@pytest.mark.usefixtures("as_on_cuda")
def test_a_second_top_k(monkeypatch):
    monkeypatch.setattr(chooser, "MANY", 10)
    processors = LogitsProcessorList([TopKLogitsWarper(5), TopKLogitsWarper(2)])
    own = NodeChooser([processors], 0, 96, "cpu")
    logits = torch.randn(1, 4, 96)
    draft = chains(torch.zeros(1, 4, dtype=torch.long))
    assert own(draft, logits)[0].equal(logits.argmax(dim=-1))


def test_infinite_logits_raise_as_plain_sampling_does():
    model = make("llama")
    recyclers = [recycling(model, graph=graph) for graph in (False, True)]
    with torch.no_grad():  # overflows in some steps only
        model.lm_head.weight[7] = 0
        model.lm_head.weight[7, 3] = 3e38
    options = {"max_new_tokens": 60, "temperature": 0.9, "seed": 1}
    errors = []
    for recycler in recyclers:
        with pytest.raises(RuntimeError) as error:
            recycler.generate(PROMPTS[0], **options)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert "inf" in errors[0]


def test_a_stream_left_open_does_not_change_the_next_answer(llama):
    texts = []
    for graph in (False, True):
        recycler = recycling(llama, graph=graph)
        torch.manual_seed(5)
        stream = recycler.stream(PROMPTS[0], max_new_tokens=60, temperature=0.9)
        chunks = [next(stream) for _ in range(3)]
        answer = recycler.generate(PROMPTS[1], max_new_tokens=20, temperature=0.9)
        texts.append((chunks, answer.token_ids))
        stream.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize("rewinds", [True, False])
def test_sampling_without_a_seed_draws_as_plain_sampling_does(llama, monkeypatch, rewinds):
    if not rewinds:
        monkeypatch.setattr(NodeChooser, "rewind", lambda *_: None)
    torch.manual_seed(5)
    expected = plain(llama, PROMPTS[0], 30, do_sample=True, temperature=0.9)
    numbers = torch.rand(3)
    recycler = recycling(llama)
    torch.manual_seed(5)
    answer = recycler.generate(PROMPTS[0], max_new_tokens=30, temperature=0.9)
    assert (answer.token_ids == expected) == rewinds  # the check of the graph draws, too
    assert torch.rand(3).equal(numbers) == rewinds
    assert [one.step.chooser.samples for one in runners(recycler)] == [True] * rewinds


@pytest.mark.parametrize("often", [True, False])
def test_random_numbers_that_others_draw_meanwhile_are_not_drawn_again(llama, often):
    for seed in range(3):
        recycler = recycling(llama)
        torch.manual_seed(seed)
        drawn = set()
        stream = recycler.stream(PROMPTS[0], max_new_tokens=12, temperature=0.9)
        for number, _ in enumerate(stream):
            if often or number == 1:
                drawn.add(float(torch.rand(1)))
        assert drawn
        assert not drawn & set(torch.rand(6000).tolist())
        assert recycler.session._graph is not None


def test_sampled_rows_of_a_batch_and_a_full_cache(llama, monkeypatch):
    monkeypatch.setattr(pool, "SMALLEST", 64)
    options = {"max_new_tokens": 120, "temperature": 0.9, "seed": 7}
    eager = recycling(llama, graph=False).generate(PROMPTS, **options)
    recycler = recycling(llama)
    answers = recycler.generate(PROMPTS, **options)
    assert [a.token_ids for a in answers] == [a.token_ids for a in eager]
    assert len(runners(recycler)) > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # new graphs share the caches, which are full
        other = recycler.generate(PROMPTS, **(options | {"temperature": 1.5}))
    assert [a.token_ids for a in other] != [a.token_ids for a in answers]


class _Draws(StoppingCriteria):
    """A streamer and a criterion that draw random numbers after every token."""

    def put(self, value):
        torch.rand(1)

    def end(self):
        pass

    def __call__(self, ids, scores, **options):
        torch.rand(1)
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("drawing", ["nobody", "a streamer", "a criterion"])
@pytest.mark.parametrize("options", [{"do_sample": True, "top_k": 9}, {"repetition_penalty": 1.2}])
def test_generate_in_a_graph_draws_as_ever(llama, monkeypatch, options, drawing):
    """Random numbers too, unless the caller's own code may draw between two tokens."""
    runs = []
    replay = CapturedStep.replay
    monkeypatch.setattr(CapturedStep, "replay", lambda self: runs.append(1) or replay(self))
    model = make("llama")
    enable(model, graph=True, strict=True, nodes=NODES)
    given = {
        "nobody": {},
        "a streamer": {"streamer": _Draws()},
        "a criterion": {"stopping_criteria": StoppingCriteriaList([_Draws()])},
    }[drawing]
    ids = torch.tensor([PROMPTS[0]])
    for seed in range(2):
        torch.manual_seed(seed)
        expected = llama.generate(ids, max_new_tokens=30, **options, **given)
        numbers = torch.rand(3)
        torch.manual_seed(seed)
        assert model.generate(ids, max_new_tokens=30, **options, **given).equal(expected)
        assert torch.rand(3).equal(numbers)
    assert bool(runs) == (drawing == "nobody" or "do_sample" not in options)

"""The step as one graph: same text, and the host one step behind.

On a CPU nothing is captured: the operations of the step run one by one.
"""

import gc
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from as_on_a_gpu import on_a_gpu, on_the_host
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)

from architectures import make
from models import plain, random_prompts
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError, enable
from token_recycling.decoding.accept import GreedyAcceptor
from token_recycling.decoding.sequence import Sequence, at_most
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import Drafter, Rows
from token_recycling.drafting.draft import chains
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.size.auto import COOLDOWN, GRAPH_SIZES, PATIENCE, AutoSize
from token_recycling.drafting.size.costs import CostCurve
from token_recycling.errors import GraphError, StepError
from token_recycling.graph import captured_step, chooser, pool
from token_recycling.graph.captured_step import CapturedStep
from token_recycling.graph.chooser import NodeChooser
from token_recycling.graph.drafting import DEVICE_NODES, HostDrafting, drafts_on_device
from token_recycling.graph.step import GraphStep, StepSpec
from token_recycling.model.kv_cache import FixedCache

PROMPTS = random_prompts([20, 7, 33, 1])
NODES = 15
SAMPLED = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.3, "top_p": 0.8, "top_k": 0},
    "min-p": {"temperature": 1.1, "min_p": 0.1},
}


@pytest.fixture(scope="module")
def llama():
    return make("llama")


def recycling(model, **options):
    return TokenRecycling(model, **({"nodes": NODES, "graph": True, "strict": True} | options))


def runners(recycler):
    return list(recycler.session._graph.pool._steps.values())


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma3", "gpt_neox")),
    ],
)
def test_one_graph_gives_the_same_text(name, monkeypatch):
    """200 tokens; grouped queries, windows, one row and four."""
    monkeypatch.setattr(pool, "SMALLEST", 512)
    model = make(name)
    expected = [plain(model, prompt, 200) for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) == 4
    recycler = recycling(model)
    for prompts, wanted in ((PROMPTS[:1], expected[:1]), (PROMPTS, expected)):
        for _ in range(2):  # cold, then hot and with other lengths
            answers = recycler.generate(prompts, max_new_tokens=200)
            assert [a.token_ids for a in answers] == wanted
        assert sum(a.stats.accepted for a in answers) > 0
    assert len(runners(recycler)) == 2  # one for each number of rows


@pytest.mark.slow
def test_steps_are_those_of_the_eager_loop(llama):
    taken = {}
    for graph in (True, False):
        steps = []
        recycler = recycling(llama, drafter="paper", graph=graph)
        recycler.generate(PROMPTS, max_new_tokens=60, on_step=steps.append)
        taken[graph] = [(step.tokens, step.reasons) for step in steps]
    assert taken[True] == taken[False]


def test_a_full_cache_is_followed_by_a_larger_one(llama, monkeypatch):
    monkeypatch.setattr(pool, "SMALLEST", 64)
    recycler = recycling(llama)
    expected = [plain(llama, prompt, 150) for prompt in PROMPTS]
    assert [a.token_ids for a in recycler.generate(PROMPTS, max_new_tokens=150)] == expected
    assert {runner.step.cache.slots for runner in runners(recycler)} == {128, 256}


def test_the_host_may_be_one_step_behind(llama, monkeypatch):
    """As on a GPU: steps that were begun too much are no part of the answer."""
    expected = [plain(llama, prompt, 60) for prompt in PROMPTS]
    ends = expected[1][25]
    monkeypatch.setattr(llama.generation_config, "eos_token_id", [ends])
    expected = [plain(llama, prompt, 60) for prompt in PROMPTS]
    assert len({len(tokens) for tokens in expected}) > 1  # rows that end at different times
    recycler = recycling(llama)
    recycler.generate(PROMPTS, max_new_tokens=2)
    (runner,) = runners(recycler)
    launched = []
    runner.lag = 1
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda active: launched.append(active) or launch(active))
    steps = []
    answers = recycler.generate(PROMPTS, max_new_tokens=60, on_step=steps.append)
    assert [a.token_ids for a in answers] == expected
    assert len(launched) == len(steps)  # the prefill is no launch, and one is left over
    answers = recycler.generate(PROMPTS, max_new_tokens=60, temperature=0.9, seed=3)
    runner.lag = 0
    again = recycler.generate(PROMPTS, max_new_tokens=60, temperature=0.9, seed=3)
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]


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


@pytest.mark.slow
def test_a_stream_that_is_left_leaves_a_context_to_go_on_from(llama):
    recycler = recycling(llama)
    tokens = []
    stream = recycler.stream(PROMPTS[0], max_new_tokens=50)
    for chunk in stream:
        tokens.append(chunk.token_id)
        if len(tokens) == 20:
            break
    stream.close()
    longer = PROMPTS[0] + tokens + [5]
    assert recycler.session._prefix.common(longer) >= len(PROMPTS[0]) + 19
    answer = recycler.generate(longer, max_new_tokens=30, keep_context=True)
    assert answer.token_ids == plain(llama, longer, 30)
    assert answer.stats.prompt_tokens < 5


@pytest.mark.slow
def test_a_stream_that_another_answer_overtook_does_no_harm(llama):
    recycler = recycling(llama)
    stream = recycler.stream(PROMPTS[0], max_new_tokens=50)
    first = [next(stream).token_id for _ in range(10)]
    longer = PROMPTS[0] + first[:8] + [5]
    answer = recycler.generate(longer, max_new_tokens=30, keep_context=True)
    assert answer.token_ids == plain(llama, longer, 30)
    with pytest.raises(TokenRecyclingError, match="has begun another"):
        list(stream)
    again = longer + answer.token_ids + [6]
    answer = recycler.generate(again, max_new_tokens=30, keep_context=True)
    assert answer.token_ids == plain(llama, again, 30)


@pytest.mark.slow
def test_a_matrix_that_moves_is_followed(llama):
    """A captured step reads fixed places; what was moved away must not be read any more."""
    recycler = recycling(llama, drafter="paper")
    expected = plain(llama, PROMPTS[0], 40)
    assert recycler.generate(PROMPTS[0], max_new_tokens=40).token_ids == expected
    (before,) = runners(recycler)
    recycler.matrix.all_candidates = recycler.matrix.all_candidates.clone()
    assert recycler.generate(PROMPTS[0], max_new_tokens=40).token_ids == expected
    (after,) = runners(recycler)
    assert after is not before


def test_drafts_that_do_not_pay_give_way_to_plain_steps(llama):
    """And are tried again; greedy and sampled text stay what they were."""
    curves = {
        "dear": CostCurve((1, 8), (1.0, 50.0)),
        "cheap": CostCurve((1, 8), (1.0, 1.01)),
    }
    for options in ({}, {"temperature": 0.8, "seed": 2}):
        options = {"max_new_tokens": 200, **options}
        eager = recycling(llama, graph=False).generate(PROMPTS[0], **options)
        sizes = {}
        for price, costs in curves.items():
            steps = []
            recycler = recycling(llama, nodes=None)
            recycler.session.size = AutoSize(recycler.drafter.acceptance, costs)
            recycler.draft_size.typical = lambda now=0: 8  # however expensive
            answer = recycler.generate(PROMPTS[0], on_step=steps.append, **options)
            assert answer.token_ids == eager.token_ids
            sizes[price] = [step.size for step in steps[1:]]
            if price == "dear":  # graphs with drafts and without have the same keys and values
                kept = [one.step.cache for one in runners(recycler)]
                assert len(kept) > len({id(cache) for cache in kept})
                assert len({id(cache) for cache in kept}) == len({cache.slots for cache in kept})
        assert set(sizes["cheap"]) == {8}
        plainly = sizes["dear"].index(1)
        assert plainly == PATIENCE
        assert set(sizes["dear"][plainly : plainly + COOLDOWN]) == {1}
        assert sizes["dear"][plainly + COOLDOWN] == 8


@dataclass
class Read(Rows):
    """Tokens of each row so far, without the next root: int64 [B]."""

    counts: torch.Tensor


class Prophet(Drafter[Read]):
    """Drafts the next eight tokens of texts that it knows."""

    name = "prophet"

    def __init__(self, texts):
        longest = max(map(len, texts))
        self.texts = torch.tensor([text + [0] * (longest - len(text)) for text in texts])

    def new_rows(self, batch, capacity=None):
        return Read(torch.zeros(batch, dtype=torch.long))

    def load(self, rows, texts):
        rows.counts.copy_(torch.tensor([len(text) for text in texts]))

    def propose(self, rows, roots, size=None):
        places = (rows.counts[:, None] + torch.arange(1, 9)).clamp(max=self.texts.shape[1] - 1)
        draft = chains(torch.cat([roots[:, None], self.texts.gather(1, places)], dim=1))
        return draft.first(size)

    def observe(self, rows, draft, candidates, accepted):
        rows.counts.add_(accepted.counts)


@pytest.mark.slow
def test_a_row_that_ended_may_be_longer_on_the_device(llama, monkeypatch):
    """It keeps the whole step that ended it, and the others' drafts stand behind that."""
    monkeypatch.setattr(pool, "SPARE_SLOTS", 0)
    monkeypatch.setattr(pool, "SMALLEST", 64)
    prompts = [PROMPTS[2], PROMPTS[3]]
    full = [plain(llama, prompt, 60) for prompt in prompts]
    drafter = Prophet([[*prompt, *text] for prompt, text in zip(prompts, full, strict=True)])
    recycler = recycling(llama, drafter=drafter)
    for new in range(14, 23):  # the last step is cut everywhere, next to the cache's end too
        sequences = [Sequence(p, [at_most(n)]) for p, n in zip(prompts, (new, 60), strict=True)]
        taken = [step.tokens for step in recycler.session.decode(sequences, GreedyAcceptor())]
        found = [[token for tokens in taken for token in tokens[row]] for row in (0, 1)]
        assert found == [full[0][:new], full[1]]
        assert [sequence.new_tokens for sequence in sequences] == found
        assert len(taken) < 20
    assert len(runners(recycler)) > 1


@pytest.mark.slow
def test_closing_an_old_stream_does_not_disturb_a_new_one(llama):
    options = {"max_new_tokens": 40, "temperature": 0.9, "seed": 11}
    recycler = recycling(llama)
    expected = recycler.generate(PROMPTS[0], **options).token_ids
    old = recycler.stream(PROMPTS[1], **(options | {"seed": 12}))
    next(old), next(old)
    new = recycler.stream(PROMPTS[0], **options)
    tokens = [next(new).token_id for _ in range(2)]
    old.close()
    assert tokens + [chunk.token_id for chunk in new] == expected


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_share_entries(name):
    model = make(name)
    shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)
    if not shared:
        pytest.skip("this configuration shares none")
    recycler = recycling(model)
    found = [recycler.generate(prompt, max_new_tokens=40).token_ids for prompt in PROMPTS[:2]]
    assert found == [plain(model, prompt, 40) for prompt in PROMPTS[:2]]
    assert runners(recycler)


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


def test_the_cache_has_room_for_the_two_steps_that_are_compared():
    for length, size in ((1, 2), (200, 81), (254, 257)):
        # Before the second step: all nodes of the first one and its next root, at most.
        assert pool.slots_for(length, size) >= length + size + 1 + size


def test_the_newer_setting_of_the_precision_is_known_too(llama, monkeypatch):
    """PyTorch refuses to read the older one once the newer one was written."""

    def refuses():
        raise RuntimeError("mixed")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    recycler = recycling(llama)
    answer = recycler.generate(PROMPTS[0], max_new_tokens=20)
    assert answer.token_ids == plain(llama, PROMPTS[0], 20)
    assert runners(recycler)


def test_autocast_keeps_no_copies_of_weights_while_a_step_runs(llama, monkeypatch):
    """A captured step would read them after autocast has freed them."""
    found = []
    run = GraphStep.run

    def seen(self):
        found.append(torch.is_autocast_cache_enabled())
        return run(self)

    monkeypatch.setattr(GraphStep, "run", seen)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    recycler = recycling(llama, nodes=3)
    with torch.autocast("cpu", torch.bfloat16):
        recycler.generate(PROMPTS[0], max_new_tokens=3)
        assert torch.is_autocast_cache_enabled()
    assert found[0] is False


def test_without_memory_it_goes_on_without_a_graph(llama, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(pool, "GraphStep", full)
    recycler = recycling(llama)
    with pytest.warns(UserWarning, match="not enough memory for a cache of 1 x 256 tokens"):
        answer = recycler.generate(PROMPTS[0], max_new_tokens=30)
    assert answer.token_ids == plain(llama, PROMPTS[0], 30)


@pytest.mark.slow
def test_the_caller_may_be_in_inference_mode(llama):
    expected = plain(llama, PROMPTS[0], 30)
    with torch.inference_mode():
        recycler = recycling(llama)
        assert recycler.generate(PROMPTS[0], max_new_tokens=30).token_ids == expected
    for _ in range(2):
        with torch.inference_mode():
            assert recycler.generate(PROMPTS[0], max_new_tokens=30).token_ids == expected
        assert recycler.generate(PROMPTS[0], max_new_tokens=30).token_ids == expected


def test_another_default_device(llama):
    expected = plain(llama, PROMPTS[0], 30)
    recycler = recycling(llama)
    torch.set_default_device("meta")
    try:
        answer = recycler.generate(PROMPTS[0], max_new_tokens=30)
    finally:
        torch.set_default_device("cpu")
    assert answer.token_ids == expected


def test_an_unknown_choice_is_refused(llama):
    with pytest.raises(TokenRecyclingError, match="it must be True, False or None"):
        TokenRecycling(llama, graph="rocket")


def test_without_a_choice_a_cpu_has_no_graph(llama):
    recycler = TokenRecycling(llama, strict=True)
    recycler.generate(PROMPTS[0], max_new_tokens=5)
    assert recycler.session._graph is None


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


def test_sizes_of_graphs_are_few():
    policy = AutoSize(tuple(0.34 * n**-0.95 for n in range(1, 81)), CostCurve.assumed("cuda"))
    assert policy.typical() in GRAPH_SIZES
    few = AutoSize((0.5, 0.4, 0.3), CostCurve.assumed("cuda"))
    assert few.typical() == 4


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


def test_the_host_makes_drafts_that_are_too_large_for_the_kernels():
    drafter = AdaptiveDrafter(AdjacencyMatrix(100, 4), 80)
    assert drafts_on_device(drafter, DEVICE_NODES)
    assert not drafts_on_device(drafter, DEVICE_NODES + 1)
    assert not drafts_on_device(drafter, None)
    assert drafts_on_device(AdaptiveDrafter(drafter.matrix, 15), None)
    assert not drafts_on_device(NoDrafter(), 8)

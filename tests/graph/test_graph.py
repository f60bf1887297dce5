"""The step as one graph: same text, and the host one step behind.

On a CPU nothing is captured: the operations of the step run one by one.
"""

from dataclasses import dataclass

import pytest
import torch
from graphs import PROMPTS, recycling, runners

from architectures import make
from models import plain
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError
from token_recycling.decoding.accept import GreedyAcceptor
from token_recycling.decoding.sequence import Sequence, at_most
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import Drafter, DrafterState
from token_recycling.drafting.draft import chains
from token_recycling.drafting.none import NoDrafter
from token_recycling.drafting.size.auto import COOLDOWN, GRAPH_SIZES, PATIENCE, AutoSize
from token_recycling.drafting.size.costs import CostCurve
from token_recycling.graph import pool
from token_recycling.graph.drafting import DEVICE_NODES, drafts_on_device
from token_recycling.graph.step import GraphStep


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
            recycler.session.draft_size = AutoSize(recycler.drafter.acceptance, costs)
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
class Read(DrafterState):
    """Tokens of each row so far, without the next root: int64 [B]."""

    counts: torch.Tensor


class Prophet(Drafter[Read]):
    """Drafts the next eight tokens of texts that it knows."""

    name = "prophet"

    def __init__(self, texts):
        longest = max(map(len, texts))
        self.texts = torch.tensor([text + [0] * (longest - len(text)) for text in texts])

    def new_state(self, batch, capacity=None):
        return Read(torch.zeros(batch, dtype=torch.long))

    def load(self, state, texts):
        state.counts.copy_(torch.tensor([len(text) for text in texts]))

    def propose(self, state, roots, size=None):
        places = (state.counts[:, None] + torch.arange(1, 9)).clamp(max=self.texts.shape[1] - 1)
        draft = chains(torch.cat([roots[:, None], self.texts.gather(1, places)], dim=1))
        return draft.first(size)

    def observe(self, state, draft, candidates, accepted):
        state.counts.add_(accepted.counts)


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


def test_sizes_of_graphs_are_few():
    policy = AutoSize(tuple(0.34 * n**-0.95 for n in range(1, 81)), CostCurve.assumed("cuda"))
    assert policy.typical() in GRAPH_SIZES
    few = AutoSize((0.5, 0.4, 0.3), CostCurve.assumed("cuda"))
    assert few.typical() == 4


def test_the_host_makes_drafts_that_are_too_large_for_the_kernels():
    drafter = AdaptiveDrafter(AdjacencyMatrix(100, 4), 80)
    assert drafts_on_device(drafter, DEVICE_NODES)
    assert not drafts_on_device(drafter, DEVICE_NODES + 1)
    assert not drafts_on_device(drafter, None)
    assert drafts_on_device(AdaptiveDrafter(drafter.matrix, 15), None)
    assert not drafts_on_device(NoDrafter(), 8)

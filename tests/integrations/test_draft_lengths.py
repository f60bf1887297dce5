"""How many tokens the plug-in for vLLM drafts: a simulated engine, whose steps cost what we say."""

import random
from types import SimpleNamespace

import pytest

from token_recycling.drafting.adaptive import expected_acceptance
from token_recycling.errors import TokenRecyclingError
from token_recycling.integrations.vllm import draft_lengths
from token_recycling.integrations.vllm.draft_lengths import DraftLengths
from token_recycling.integrations.vllm.options import (
    METHOD,
    VllmOptions,
    configure,
    expects_trees,
    lengths_by_requests,
)

TABLE, OPTIONS = [0, *[6] * 36, *[3] * 28, *[0] * 64], VllmOptions(mode="chain")
TREES = [0, 63, 31, 15, 7, 3, 0]


class Engine:
    """An engine that is one step ahead of what its scheduler knows."""

    def __init__(self, monkeypatch, requests, right, per_token, jitter=0.03):
        self.rng, self.now = random.Random(1), 0.0
        monkeypatch.setattr(draft_lengths, "perf_counter", lambda: self.now)
        self.lengths = DraftLengths(TABLE, OPTIONS, "cuda")
        self.requests, self.right = requests, right
        self.per_token, self.jitter = per_token, jitter

    def seconds(self, length):
        tokens = self.requests * (length + 1)
        return (0.005 + self.per_token * tokens) * self.rng.uniform(1, 1 + self.jitter)

    def came(self, length):
        """Tokens that a chain of so many brings."""
        came = 1
        while came <= length and self.rng.random() < self.right:
            came += 1
        return came

    def run(self, steps):
        """(share of steps with drafts, speed relative to that of plain steps) of later steps."""
        behind, drafted, tokens, began = None, 0, 0, 0.0
        for step in range(steps):
            length = self.lengths[self.requests]
            if behind is not None:
                self.lengths.record(*behind, False)
            emitted = []
            emitted = [self.came(length) for _ in range(self.requests)]
            self.now += self.seconds(length)
            behind = {str(i): length for i in range(self.requests)}, emitted
            if step == steps // 4:
                began, drafted, tokens = self.now, 0, 0
            drafted += length > 0
            tokens += sum(emitted)
        count = steps - steps // 4
        plain = self.requests / (0.005 + self.per_token * self.requests) / (1 + self.jitter / 2)
        return drafted / count, tokens / (self.now - began) / plain


@pytest.mark.parametrize("requests", [1, 4, 16])
def test_drafts_that_are_right_are_made(monkeypatch, requests):
    share, speed = Engine(monkeypatch, requests, 0.5, 1e-6).run(800)
    assert share > 0.9
    assert speed > 1.6


@pytest.mark.parametrize("requests", [1, 4, 16, 32, 64])
def test_drafts_that_fail_pause(monkeypatch, requests):
    """Prompts of random tokens at temperature 1."""
    share, speed = Engine(monkeypatch, requests, 0.01, 2e-5).run(2000)
    assert share < (0.1 if requests > 1 else 0.3)  # one more token costs next to nothing
    assert speed > 0.97


@pytest.mark.parametrize("requests", [32, 64])
def test_tokens_that_cost_much_are_few(monkeypatch, requests):
    """So many tokens take longer than their drafts bring: the speed is not below plain."""
    _, speed = Engine(monkeypatch, requests, 0.4, 5e-5).run(2000)
    assert speed > 0.97


def test_without_pauses_failing_drafts_cost(monkeypatch):
    monkeypatch.setattr(DraftLengths, "__getitem__", lambda self, requests: TABLE[requests])
    _, speed = Engine(monkeypatch, 16, 0.01, 2e-5).run(400)
    assert speed < 0.8


def test_more_requests_than_the_table_has(monkeypatch):
    assert DraftLengths(TABLE, OPTIONS, "cuda")[1000] == 0


@pytest.mark.parametrize(
    ("requests", "most"), [(1, 63), (4, 63), (5, 31), (16, 15), (32, 7), (64, 3), (65, 0)]
)
def test_trees_are_as_large_as_is_free(monkeypatch, requests, most):
    """By what steps cost on average on a GPU, after the first, plain ones."""
    monkeypatch.setattr(draft_lengths, "perf_counter", lambda: 0.0)
    lengths = DraftLengths(TREES, VllmOptions(), "cuda")
    for _ in range(4):
        assert lengths[requests] == 0
        lengths.record({str(i): 0 for i in range(requests)}, [1] * requests, False)
    assert lengths[requests] <= most
    assert (lengths[requests] > 0) == (most > 0)
    assert requests > 1 or lengths[requests] >= 31


@pytest.mark.parametrize(("requests", "cost"), [(1, 1e-5), (4, 1e-5), (16, 3e-5), (48, 3e-5)])
def test_trees_gain_or_are_left_out(monkeypatch, requests, cost):
    """Nodes that are right as those of real text are, and tokens that cost more and more."""
    engine = Engine(monkeypatch, requests, 0.0, cost)
    engine.lengths = DraftLengths(TREES, VllmOptions(), "cuda")
    acceptance = expected_acceptance(63)

    def tokens(length):  # one more than the number of nodes that are right
        return 1 + sum(engine.rng.random() < each for each in acceptance[:length])

    monkeypatch.setattr(engine, "came", tokens)
    _, speed = engine.run(1200)
    assert speed > (1.8 if requests <= 4 else 0.97)


def test_lengths_by_requests():
    """Ranges cover all numbers of requests, and lengths that may be needed occur."""
    ranges = lengths_by_requests(VllmOptions(), 6, 256)
    assert ranges == [(1, 36, 6), (37, 64, 3), (65, 256, 0)]
    trees = lengths_by_requests(VllmOptions(), 63, None)
    assert trees == [(1, 4, 63), (5, 8, 31), (9, 16, 15), (17, 32, 7), (33, 64, 3), (65, 1024, 0)]
    assert lengths_by_requests(VllmOptions(), 63, 4) == [
        (1, 1, 63),
        (2, 2, 31),
        (3, 3, 15),
        (4, 4, 0),
    ]
    assert lengths_by_requests(VllmOptions(), 6, 8) == [(1, 6, 6), (7, 7, 3), (8, 8, 0)]
    assert lengths_by_requests(VllmOptions(automatic=False), 6, 8) == [(1, 8, 6)]
    assert lengths_by_requests(VllmOptions(), 6, 1) == [(1, 1, 6)]
    assert lengths_by_requests(VllmOptions(), 1, 4)[-1] == (4, 4, 0)


class Arguments:
    """What ``configure`` reads and changes of vLLM's arguments."""

    additional_config = None
    scheduler_cls = None
    max_num_seqs = 32
    attention_backend = None
    attention_config = SimpleNamespace(backend=None)
    kv_cache_dtype = "auto"
    enable_lora = False

    def __init__(self, **config):
        self.speculative_config = config


KNOWN = {
    "method",
    "model",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "enable_adaptive_verification",
}


def test_one_object_configures_both_runners():
    on_gpu, on_cpu = (Arguments(method=METHOD, candidates=8) for _ in range(2))
    assert configure(on_gpu, False, False, KNOWN)
    assert on_gpu.speculative_config["method"] == "ngram_gpu"
    assert on_gpu.speculative_config["num_speculative_tokens"] == 6
    assert on_gpu.scheduler_cls.endswith("scheduler.recycling_scheduler")
    assert configure(on_cpu, True, True, KNOWN)
    assert on_cpu.speculative_config["method"] == "custom_class"
    assert on_cpu.scheduler_cls is None
    for found in (on_gpu, on_cpu):
        options = found.additional_config["token_recycling"]
        assert options["candidates"] == 8
        assert "candidates" not in found.speculative_config


def test_trees_where_they_can_be_expected():
    model = SimpleNamespace(use_mla=False, uses_mrope=False, is_mm_prefix_lm=False)
    parallel = SimpleNamespace(data_parallel_size=1, decode_context_parallel_size=1)

    def expected(capability=(9, 0), backend=None, cache="auto", **of_model):
        arguments = Arguments()
        arguments.attention_backend, arguments.kv_cache_dtype = backend, cache
        changed = SimpleNamespace(**vars(model) | of_model)
        return expects_trees(arguments, changed, parallel, capability)

    assert expected()
    assert expected((8, 6))
    assert not expected((10, 0))  # FlashInfer is the default there
    assert expected((10, 0), "flash_attn")
    assert expected((9, 0), "auto")
    assert expected(None, SimpleNamespace(name="TRITON_ATTN"))
    assert not any([expected(None), expected((7, 5)), expected(cache="fp8")])
    assert not any([expected(use_mla=True), expected(uses_mrope=True)])
    parallel.data_parallel_size = 2
    assert not expected()


@pytest.mark.parametrize(
    ("config", "trees", "mode", "tokens"),
    [
        ({}, True, "auto", 63),
        ({}, False, "chain", 6),
        ({"mode": "chain"}, True, "chain", 6),
        ({"mode": "tree"}, False, "tree", 63),
        ({"num_speculative_tokens": 20}, True, "auto", 20),
    ],
)
def test_trees_are_the_default_where_they_can_be_expected(config, trees, mode, tokens):
    arguments = Arguments(method=METHOD, **config)
    assert configure(arguments, False, trees, KNOWN)
    assert arguments.additional_config["token_recycling"].get("mode", "auto") == mode
    assert arguments.speculative_config["num_speculative_tokens"] == tokens


def test_what_a_user_sets_stays():
    theirs = Arguments(
        method=METHOD, num_speculative_tokens=4, num_speculative_tokens_per_batch_size=[(1, 9, 2)]
    )
    theirs.additional_config = {"other": 1}
    configure(theirs, False, True, KNOWN)
    assert theirs.speculative_config["num_speculative_tokens_per_batch_size"] == [(1, 9, 2)]
    assert theirs.scheduler_cls is None  # vLLM's follows the table
    assert theirs.additional_config["other"] == 1
    others = Arguments(method="ngram_gpu", num_speculative_tokens=4)
    assert not configure(others, False, True, KNOWN)
    assert others.speculative_config == {"method": "ngram_gpu", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "token-recycling"}, "has the method 'token-recycling'; use 'token_recycling'"),
        ({"method": METHOD, "candidate": 8}, "no option 'candidate'; did you mean 'candidates'"),
        ({"method": METHOD, "xyz": 8}, "no option 'xyz'; use one of automatic, candidates, "),
        (
            {"method": METHOD, "mode": "forest"},
            "mode is 'forest'; it must be one of auto, ",
        ),
        ({"method": METHOD, "num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must"),
        ({"method": METHOD, "num_speculative_tokens": "6"}, "num_speculative_tokens is '6'; it"),
    ],
)
def test_bad_options_are_said_in_one_line(config, says):
    with pytest.raises(TokenRecyclingError, match=says.replace("(", r"\(")) as error:
        configure(Arguments(**config), False, True, KNOWN)
    assert "\n" not in str(error.value)

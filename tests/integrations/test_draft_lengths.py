"""How many tokens the plug-in for vLLM drafts: a simulated engine, whose steps cost what we say."""

import random

import pytest

from token_recycling.errors import TokenRecyclingError
from token_recycling.integrations.vllm import draft_lengths
from token_recycling.integrations.vllm.draft_lengths import DraftLengths
from token_recycling.integrations.vllm.options import (
    METHOD,
    VllmOptions,
    configure,
    lengths_by_requests,
)

TABLE = [0, *[6] * 36, *[3] * 28, *[0] * 64]


class Engine:
    """An engine that is one step ahead of what its scheduler knows."""

    def __init__(self, monkeypatch, requests, right, per_token, jitter=0.03):
        self.rng, self.now = random.Random(1), 0.0
        monkeypatch.setattr(draft_lengths, "perf_counter", lambda: self.now)
        self.lengths = DraftLengths(TABLE, "cuda")
        self.requests, self.right = requests, right
        self.per_token, self.jitter = per_token, jitter

    def seconds(self, length):
        tokens = self.requests * (length + 1)
        return (0.005 + self.per_token * tokens) * self.rng.uniform(1, 1 + self.jitter)

    def run(self, steps):
        """(share of steps with drafts, speed relative to that of plain steps) of later steps."""
        behind, drafted, tokens, began = None, 0, 0, 0.0
        for step in range(steps):
            length = self.lengths[self.requests]
            if behind is not None:
                self.lengths.record(*behind, False)
            emitted = []
            for _ in range(self.requests):
                came = 1
                while came <= length and self.rng.random() < self.right:
                    came += 1
                emitted.append(came)
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
    monkeypatch.setattr(DraftLengths, "__getitem__", lambda self, requests: self._table[requests])
    _, speed = Engine(monkeypatch, 16, 0.01, 2e-5).run(400)
    assert speed < 0.8


def test_more_requests_than_the_table_has(monkeypatch):
    assert DraftLengths(TABLE, "cuda")[1000] == 0


def test_lengths_by_requests():
    """Ranges cover all numbers of requests, and lengths that may be needed occur."""
    ranges = lengths_by_requests(VllmOptions(), 6, 256)
    assert ranges == [(1, 36, 6), (37, 64, 3), (65, 256, 0)]
    assert lengths_by_requests(VllmOptions(), 6, 8) == [(1, 6, 6), (7, 7, 3), (8, 8, 0)]
    assert lengths_by_requests(VllmOptions(automatic=False), 6, 8) == [(1, 8, 6)]
    assert lengths_by_requests(VllmOptions(), 6, 1) == [(1, 1, 6)]
    assert lengths_by_requests(VllmOptions(), 1, 4)[-1] == (4, 4, 0)


class Arguments:
    """What ``configure`` reads and changes of vLLM's arguments."""

    additional_config = None
    scheduler_cls = None
    max_num_seqs = 32

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
    assert configure(on_gpu, False, KNOWN)
    assert on_gpu.speculative_config["method"] == "ngram_gpu"
    assert on_gpu.speculative_config["num_speculative_tokens"] == 6
    assert on_gpu.scheduler_cls.endswith("scheduler.recycling_scheduler")
    assert configure(on_cpu, True, KNOWN)
    assert on_cpu.speculative_config["method"] == "custom_class"
    assert on_cpu.scheduler_cls is None
    for found in (on_gpu, on_cpu):
        assert found.additional_config == {"token_recycling": {"candidates": 8}}
        assert "candidates" not in found.speculative_config


def test_what_a_user_sets_stays():
    theirs = Arguments(
        method=METHOD, num_speculative_tokens=4, num_speculative_tokens_per_batch_size=[(1, 9, 2)]
    )
    theirs.additional_config, theirs.scheduler_cls = {"other": 1}, "mine.Scheduler"
    configure(theirs, False, KNOWN)
    assert theirs.speculative_config["num_speculative_tokens_per_batch_size"] == [(1, 9, 2)]
    assert theirs.scheduler_cls == "mine.Scheduler"
    assert theirs.additional_config["other"] == 1
    others = Arguments(method="ngram_gpu", num_speculative_tokens=4)
    assert not configure(others, False, KNOWN)
    assert others.speculative_config == {"method": "ngram_gpu", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "token-recycling"}, "has the method 'token-recycling'; use 'token_recycling'"),
        ({"method": METHOD, "candidate": 8}, "no option 'candidate'; did you mean 'candidates'"),
        ({"method": METHOD, "xyz": 8}, "no option 'xyz'; use one of automatic, candidates, "),
        ({"method": METHOD, "mode": "forest"}, "mode is 'forest'; it must be one of chain, tree"),
        ({"method": METHOD, "num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must"),
        ({"method": METHOD, "num_speculative_tokens": "6"}, "num_speculative_tokens is '6'; it"),
    ],
)
def test_bad_options_are_said_in_one_line(config, says):
    with pytest.raises(TokenRecyclingError, match=says.replace("(", r"\(")) as error:
        configure(Arguments(**config), False, KNOWN)
    assert "\n" not in str(error.value)

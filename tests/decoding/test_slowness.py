"""The line that says that other programs make decoding slow."""

import time

from architectures import make
from models import random_prompts
from token_recycling import TokenRecycling
from token_recycling.decoding.metrics import Stats
from token_recycling.decoding.slowness import Reminder, why_slow


def stats(seconds, lost):
    return Stats(steps=10, seconds={"verify": seconds}, lost_seconds=lost)


def test_who_lost_much_of_its_time_is_told():
    assert "60%" in why_slow(stats(10.0, 6.0))
    assert why_slow(stats(10.0, 1.0)) is None
    assert why_slow(stats(0.1, 0.09)) is None
    assert why_slow(Stats()) is None


def test_once_in_a_while(monkeypatch):
    reminder = Reminder(100.0)
    assert reminder.due(None) is None
    assert reminder.due("slow") == "slow"
    assert reminder.due("slow") is None
    later = time.monotonic() + 101
    monkeypatch.setattr("token_recycling.decoding.slowness.monotonic", lambda: later)
    assert reminder.due("slow") == "slow"


def test_time_without_a_core_counts_as_lost():
    """The control: an answer that is not held up has lost little."""
    recycler, (prompt,) = TokenRecycling(make("llama")), random_prompts([12])
    recycler.generate(prompt, max_new_tokens=20)

    def held_up(*about):
        time.sleep(0.02)

    quiet = recycler.generate(prompt, max_new_tokens=20).stats
    slow = recycler.generate(prompt, max_new_tokens=20, on_draft=held_up).stats
    assert slow.lost_seconds > 0.018 * slow.steps
    assert quiet.lost_seconds < slow.lost_seconds
    assert slow.to_dict()["lost_seconds"] == slow.lost_seconds

"""What a comparison with ``generate`` says of its figures, and what it does not say."""

from __future__ import annotations

import pytest

from architectures import make
from command import call
from token_recycling import PlainDecodingWarning, TokenRecycling
from token_recycling.bench.compare import Comparison, compare
from token_recycling.cli import demo
from token_recycling.decoding.metrics import Stats

PROMPT = list(range(3, 20))


def comparison(tokens, plain=2.0, own=1.0, **options):
    stats = Stats(steps=10, accepted=10, drafted=40)
    return Comparison(
        "text",
        tokens,
        tokens,
        [plain, plain],
        [own, 0.8 * own],
        0.1,
        0.2 * own / plain,
        stats,
        **options,
    )


def test_a_fallback_gains_nothing_by_kernels():
    """Its steps are the model's own: what differs is noise."""
    with pytest.warns(PlainDecodingWarning):
        recycler = TokenRecycling(make("qwen3_next"))
    found = compare(recycler, PROMPT, {"max_new_tokens": 8}, rounds=1)
    assert found.fallback
    assert found.identical
    assert "kernels" not in found.table()
    assert "both decode plainly" in found.table()


def test_a_model_that_recycles_does():
    found = compare(TokenRecycling(make("llama")), PROMPT, {"max_new_tokens": 8}, rounds=1)
    assert not found.fallback
    assert "a step takes" in found.table()
    assert "faster kernels" in comparison(list(range(40)), plain=4.0).table()
    assert "faster kernels" not in comparison(list(range(40)), plain=1.0).table()


def test_rounds_have_a_range():
    assert "2 interleaved rounds, 2.00x to 2.50x" in comparison(list(range(40))).table()


def test_an_answer_that_repeats_itself_is_marked():
    assert "mostly repeats itself" in comparison([1, 2, 3] * 20).table()
    assert "repeats itself" not in comparison(list(range(60))).table()


def test_the_demo_does_not_count_such_answers():
    fresh = [comparison(list(range(i, i + 60)), plain=1.0 + i) for i in range(3)]
    summary = demo._summary([*fresh, comparison([1, 2, 3] * 20, plain=40.0)])
    assert "4 of 4 outputs identical to model.generate" in summary
    assert "Speedup 2.22x (median of 3 prompts; quartiles 1.67 and 2.78)" in summary
    assert summary.endswith("; 1 answer that repeats itself left out.")
    assert "left out" not in demo._summary(fresh)
    alone = demo._summary([fresh[1], *[comparison([1, 2, 3] * 20)] * 7])
    assert "(median of 1 prompts; quartiles 2.22 and 2.22)" in alone
    assert alone.endswith("; 7 answers that repeat themselves left out.")


def test_the_demo_marks_them(monkeypatch):
    monkeypatch.setattr("token_recycling.bench.measures.repeats", lambda tokens: True)
    code, out, _ = call("demo", "-m", "bundled", "-n", 4)
    assert code == 0
    assert out.count("  repeats itself") == 8

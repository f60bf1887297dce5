"""The bundled model: what ships, and identity with ``model.generate`` on real text."""

import json

import pytest

from models import DRAFTS
from token_recycling import TokenRecycling
from token_recycling.bench.compare import plain_generate
from token_recycling.bench.prompts import DEMO
from token_recycling.checkpoint.load import BUNDLED_MODEL


def ask(question):
    return [{"role": "user", "content": question}]


def read_questions(folder):
    """60 prompts: 30 of GSM8K's test part, 30 first turns of Spec-Bench, spread over its kinds."""
    maths = [json.loads(x)["question"] for x in (folder / "gsm8k_test.jsonl").open()]
    mixed = [json.loads(x)["turns"][0] for x in (folder / "spec_bench/question.jsonl").open()]
    short = [text for text in mixed if len(text) < 3000]
    return [*maths[:30], *short[:: len(short) // 30][:30]]


def check_identity(recyclers, questions, n):
    """Compare every tree, one by one and in batches of five, with ``model.generate``."""
    one = next(iter(recyclers.values()))
    expected = [plain_generate(one, ask(q), {"max_new_tokens": n}) for q in questions]
    for name, recycler in recyclers.items():
        found = [recycler.generate(ask(q), max_new_tokens=n).token_ids for q in questions]
        assert found == expected, name
        for begin in range(0, len(questions), 5):
            group = [ask(q) for q in questions[begin : begin + 5]]
            batch = [a.token_ids for a in recycler.generate(group, max_new_tokens=n)]
            assert batch == expected[begin : begin + 5], f"{name}, batch"


@pytest.fixture(scope="module")
def recyclers(bundled):
    return {
        str(drafts): TokenRecycling(bundled.model, bundled.tokenizer, strict=True, **drafts)
        for drafts in DRAFTS
    }


@pytest.mark.slow
def test_identity_on_eight_prompts(recyclers):
    check_identity(recyclers, list(DEMO), 60)


@pytest.mark.slow
def test_identity_on_sixty_prompts(recyclers, shared_data):
    check_identity(recyclers, read_questions(shared_data), 200)


def test_what_ships_is_small_and_documented():
    files = list(BUNDLED_MODEL.iterdir())
    assert sum(f.stat().st_size for f in files) <= 20 * 2**20
    card = (BUNDLED_MODEL / "README.md").read_text()
    for needed in (
        "GSM8K",
        "MIT",
        "PSF",
        "public domain",
        "held-out",
        "loop",
        "train_demo_model.py",
    ):
        assert needed in card, needed
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert 4000 <= config["vocab_size"] <= 8192


def test_most_answers_do_not_loop():
    training = json.loads((BUNDLED_MODEL / "training.json").read_text())
    assert training["greedy_answers_that_loop"] < training["greedy_answers"] / 2

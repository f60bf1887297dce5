"""Autocast, default dtypes, float64, overflow, a projection wider than the vocabulary."""

from __future__ import annotations

import pytest
import torch

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling, enable
from token_recycling.decoding.accept import greedy
from token_recycling.model.target import TreeTarget

DRAFTERS = ("adaptive", "paper", "prompt-lookup")
[PROMPT] = random_prompts([24])
IDS = torch.tensor([PROMPT])


def stock(model, ids=IDS, **options):
    mask = torch.ones_like(ids)
    return type(model).generate(model, ids, attention_mask=mask, pad_token_id=0, **options)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("nodes", [None, 16])
def test_autocast_around_a_call(drafter, nodes, bundled):
    """Drafting is not for half precision; the model's own forward is."""
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, drafter=drafter, nodes=nodes)
    for text in ("Once upon a time there was a king", "Tom has 12 marbles. He buys 3 bags."):
        ids = bundled.tokenizer(text, return_tensors="pt").input_ids
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer = recycler.generate(text, max_new_tokens=60)
            expected = stock(bundled.model, ids, max_new_tokens=60, do_sample=False)
        # half precision: near ties may fall either way, but not at once
        same = [a == b for a, b in zip(answer.token_ids, expected[0, ids.shape[1] :].tolist())]
        assert all(same[:8])
        assert recycler.matrix.probabilities.isfinite().all()


def test_autocast_around_a_call_as_a_graph(bundled):
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, nodes=16, graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = recycler.generate("Once upon a time there was a king", max_new_tokens=40)
        readable = TokenRecycling(bundled.model, bundled.tokenizer, nodes=16)
        expected = readable.generate("Once upon a time there was a king", max_new_tokens=40)
        if not isinstance(readable.target, TreeTarget):
            pytest.skip("PyTorch's bfloat16 products differ with the number of rows here")
    assert answer.token_ids[:8] == expected.token_ids[:8]
    assert recycler.session._graph is not None
    assert recycler.matrix.evidence.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("made_inside", [True, False])
def test_another_default_dtype(dtype, drafter, made_inside):
    model = make("llama")
    expected = plain(model, PROMPT, 40)
    recycler = None if made_inside else TokenRecycling(model, drafter=drafter)
    torch.set_default_dtype(dtype)
    try:
        recycler = recycler or TokenRecycling(model, drafter=drafter)
        answer = recycler.generate(PROMPT, max_new_tokens=40)
        sampled = recycler.generate(PROMPT, max_new_tokens=20, temperature=0.9, seed=3)
        torch.manual_seed(3)
        right = stock(model, max_new_tokens=20, do_sample=True, temperature=0.9)
    finally:
        torch.set_default_dtype(torch.float32)
    assert answer.token_ids == expected
    assert sampled.token_ids == right[0, len(PROMPT) :].tolist()


def test_float64_logits_tie_as_in_generate():
    """``generate`` rounds them to float32 first, and takes the first of equals."""
    logits = torch.zeros(1, 1, 8, dtype=torch.float64)
    logits[..., 3], logits[..., 5] = 1.0, 1.0 + 1e-12
    assert int(greedy(logits)) == 3
    model = make("llama").double()
    with torch.no_grad():  # tokens 2i and 2i + 1 differ by less than float32 can tell
        even = model.lm_head.weight[::2]
        model.lm_head.weight[1::2] = even * (1 + 1e-13)
    expected = plain(model, PROMPT, 40)
    recycler = TokenRecycling(model, nodes=8)
    assert recycler.generate(PROMPT, max_new_tokens=40).token_ids == expected
    assert all(token % 2 == 0 for token in expected)  # the control: there were ties


class Spoiled(torch.nn.Module):
    """A last norm whose output for some tokens is not finite."""

    def __init__(self, norm, value, every):
        super().__init__()
        self.norm, self.value, self.every, self.calls = norm, value, every, 0

    def forward(self, hidden):
        self.calls += 1
        out = self.norm(hidden)
        if self.calls % self.every == 0:
            out = out.clone()
            out[..., 0] = self.value
        return out


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_logits_that_are_not_finite_are_not_learnt(value, drafter):
    model = make("llama")
    recycler = TokenRecycling(model, drafter=drafter, nodes=8)
    expected = plain(model, PROMPT, 40)
    inner = recycler.target.shadow.model  # the probe would refuse such a model
    norm = inner.norm
    for every in (1, 3):
        inner.norm = Spoiled(norm, value, every).eval()
        recycler.generate(PROMPT, max_new_tokens=10)
        assert recycler.matrix.probabilities.isfinite().all()
        assert recycler.matrix.evidence.isfinite().all()
        inner.norm = norm
        for _ in range(3):  # healthy again
            assert recycler.generate(PROMPT, max_new_tokens=40).token_ids == expected


def test_all_logits_not_finite_emit_what_generate_emits():
    model = make("llama")
    recycler = TokenRecycling(model, nodes=8)
    model.lm_head.weight.data[5] = float("inf")
    model.lm_head.weight.data[6] = float("nan")
    found = recycler.generate(PROMPT, max_new_tokens=10)
    assert found.token_ids == plain(model, PROMPT, 10)
    assert recycler.matrix.probabilities.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_drafted_token_that_overflows_spoils_nothing(value, graph, batch):
    """A masked entry that is not finite is still not finite: 0 · NaN."""
    model = make("llama")
    prompts = random_prompts([20] * batch, seed=2)
    written = {token for prompt in prompts for token in plain(model, prompt, 40)}
    used = written.union(*prompts) | {0}
    poison = next(token for token in range(3, 96) if token not in used)
    recycler = TokenRecycling(model, nodes=8, graph=graph)
    recycler.generate(prompts if batch > 1 else prompts[0], max_new_tokens=5)
    model.get_input_embeddings().weight.data[poison] = value
    expected = [plain(model, prompt, 40) for prompt in prompts]
    assert not any(poison in answer for answer in expected)
    # every row proposes it
    recycler.matrix.candidates[:, 0] = poison
    recycler.matrix.probabilities[:, 0] = 0.9
    found = recycler.generate(prompts, max_new_tokens=40)
    assert [answer.token_ids for answer in found] == expected
    found = recycler.generate(prompts, max_new_tokens=40)
    assert [answer.token_ids for answer in found] == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_fills_up_a_batch_spoils_no_row(value):
    model = make("llama")
    prompts = [[t or 3 for t in prompt] for prompt in random_prompts([5, 9, 12], seed=3)]
    recycler = TokenRecycling(model, nodes=8)
    model.get_input_embeddings().weight.data[0] = value
    expected = [plain(model, prompt, 20) for prompt in prompts]
    found = recycler.generate(prompts, max_new_tokens=20)
    assert [answer.token_ids for answer in found] == expected


@pytest.mark.parametrize("drafter", ["adaptive", "paper"])
@pytest.mark.parametrize("embeddings", [96, 128])
def test_a_projection_wider_than_the_vocabulary(drafter, embeddings):
    """128 logits where the configuration says 96, with and without embeddings for them."""
    model = make("llama")
    torch.manual_seed(0)
    head = torch.nn.Linear(model.config.hidden_size, 128, bias=False)
    head.weight.data[:96] = model.lm_head.weight.data
    head.weight.data[96:] = model.lm_head.weight.data[:32] * (1.5 if embeddings > 96 else 0.999)
    model.lm_head = head
    if embeddings > 96:
        wide = torch.nn.Embedding(128, model.config.hidden_size)
        wide.weight.data[:96] = model.model.embed_tokens.weight.data
        model.model.embed_tokens = wide
    expected = plain(model, PROMPT, 40)
    recycler = TokenRecycling(model, drafter=drafter, nodes=8)
    for _ in range(2):
        assert recycler.generate(PROMPT, max_new_tokens=40).token_ids == expected
    assert (max(expected) >= 96) == (embeddings > 96)
    if embeddings > 96:  # else plain decoding fails after the first such token
        sampled = recycler.generate(PROMPT, max_new_tokens=20, temperature=1.0, seed=5)
        torch.manual_seed(5)
        right = stock(model, max_new_tokens=20, do_sample=True, temperature=1.0)
        assert sampled.token_ids == right[0, len(PROMPT) :].tolist()


def test_it_works_through_enable_too():
    model = make("llama")
    with enable(model, drafter="paper"), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.generate(IDS, max_new_tokens=20, pad_token_id=0)
        expected = stock(model, max_new_tokens=20)
    assert torch.equal(found[:, :30], expected[:, :30])

"""The kernels for few tokens in answers: used in our own forwards, and nowhere else."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from architectures import make
from models import plain, random_prompts
from skinny_kernels import attention, linear, team
from skinny_kernels import sdpa as packing
from skinny_kernels.attention import draft_mask, pack_mask
from skinny_kernels.vectors import DTYPES
from skinny_kernels.windows import AttentionWindow, additive_masks
from test_few_queries import case
from token_recycling import TokenRecycling

pytestmark = pytest.mark.skipif(
    not team.is_available(), reason="there is no team of threads on this machine"
)


@pytest.fixture
def products(monkeypatch):
    """Products of the kernel."""
    seen = []
    kernel = linear.products
    monkeypatch.setattr(linear, "products", lambda *a, **k: seen.append(a) or kernel(*a, **k))
    return seen


def test_an_answer_uses_the_kernel(products):
    model, (prompt,) = make("llama"), random_prompts([12])
    answer = TokenRecycling(model, nodes=16).generate(prompt, max_new_tokens=20)
    assert answer.token_ids == plain(model, prompt, 20)
    assert products
    before = len(products)
    plain(model, prompt, 2)
    assert len(products) == before


def test_half_precision_gives_the_text_of_our_own_plain_steps(products):
    """Rows have the same bits alone and in a tree; with float32 the other kernels are covered."""
    model, prompts = make("llama").to(torch.bfloat16), random_prompts([12, 7, 30])
    for prompt in prompts:
        texts = [
            TokenRecycling(model, nodes=nodes).generate(prompt, max_new_tokens=20).token_ids
            for nodes in (1, 16)
        ]
        assert texts[0] == texts[1]
    assert products


@pytest.fixture
def calls(monkeypatch):
    seen = []
    kernel = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a: seen.append(a) or kernel(*a))
    return seen


def test_where_it_is_used(calls):
    """In steps, not in prompts, and not in the caller's own forwards."""
    model, prompts = make("llama", attn_implementation="sdpa"), random_prompts([200, 12])
    answers = TokenRecycling(model, nodes=16).generate(prompts, max_new_tokens=20)
    assert {call[0].shape[2] for call in calls} <= set(range(1, 33))  # filled up
    assert calls
    calls.clear()
    assert [one.token_ids for one in answers] == [plain(model, one, 20) for one in prompts]
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_it_the_text_is_the_same(dtype, calls, monkeypatch):
    """Where PyTorch has another OpenMP runtime, and for dtypes that it does not take."""
    if dtype == torch.float32:
        monkeypatch.setattr(attention, "is_available", lambda: False)
    model, (prompt,) = make("llama", attn_implementation="sdpa").to(dtype), random_prompts([30])
    answer = TokenRecycling(model, nodes=16).generate(prompt, max_new_tokens=20)
    assert answer.token_ids == plain(model, prompt, 20)
    assert not calls


@pytest.mark.parametrize("option", [{"position_bias": torch.ones(1)}, {"softcap": 2.0}])
def test_an_option_that_alters_the_scores(option, calls):
    """What PyTorch's attention does with it, which ignores a cap in old releases, stays."""
    query, key, value, mask, scale = case(1, 2, 2, 3, 9, 8, 8, torch.float32)
    seen = []
    packing.packed_attention(
        lambda *a, **o: seen.append(o) or (None, None),
        torch.nn.Module(),
        query,
        key,
        value,
        packing.pack_queries(mask),
        scaling=scale,
        **option,
    )
    assert seen == [{"scaling": scale, **option}]
    assert not calls


def _count(seen, kernel, launch, *about):
    seen.append(kernel)
    launch(*about)


def test_steps_of_graphs_use_it_too(monkeypatch):
    """And the kernel of linear layers."""
    seen = []
    for kernel in (attention, linear):
        launch = partial(_count, seen, kernel, kernel.launch)
        monkeypatch.setattr(kernel, "launch", launch)
    model, (prompt,) = make("llama", attn_implementation="sdpa"), random_prompts([30])
    recycler = TokenRecycling(model, nodes=8, graph=True)
    eager = TokenRecycling(model, nodes=8).generate(prompt, max_new_tokens=20)
    seen.clear()
    with monkeypatch.context() as patch:  # were a step decoded eagerly, it would raise
        patch.setattr(recycler.target, "verify", None)
        answer = recycler.generate(prompt, max_new_tokens=20)
    layers = model.config.num_hidden_layers
    assert answer.token_ids == eager.token_ids
    assert seen.count(attention) >= layers * answer.stats.steps
    assert seen.count(linear) >= 4 * layers * answer.stats.steps  # some are multiplied together


@settings(max_examples=80, deadline=None)
@given(
    committed=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    tokens=st.integers(1, 9),
    group=st.integers(1, 4),
    window=st.sampled_from([("full", 0), ("sliding", 5), ("sliding", 64), ("chunked", 7)]),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 2**16),
)
def test_the_mask_of_a_draft(committed, tokens, group, window, dtype, seed):
    """As packed from the mask that Transformers' code gets, where the kernel reads it."""
    draws, batch = torch.Generator().manual_seed(seed), len(committed)
    lengths, end = torch.tensor(committed)[:, None], max(committed)
    ancestors = torch.rand(batch, tokens, tokens, generator=draws) < 0.5
    positions = lengths + torch.randint(9, (batch, tokens), generator=draws)
    windows = {"all": AttentionWindow(*window)}
    slots = torch.arange(end).expand(batch, -1)
    visible = (slots < lengths)[:, None].expand(batch, tokens, -1)
    mask = additive_masks(
        windows,
        torch.cat([visible, ancestors], 2),
        positions,
        torch.cat([slots, positions], 1),
        dtype,
    )
    wanted = pack_mask(mask, lengths[:, 0], group).numpy()
    found = draft_mask(lengths[:, 0].numpy(), positions, ancestors, windows["all"], group, dtype)
    assert found.shape == wanted.shape
    for row, length in enumerate(committed):
        assert (found[row, : length + tokens] == wanted[row, : length + tokens]).all()

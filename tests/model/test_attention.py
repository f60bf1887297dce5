"""Packed heads: the same attention, with every key read once."""

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from architectures import make
from models import plain, random_prompts
from skinny_kernels.sdpa import (
    PackedSdpa,
    pack_queries,
    packed_attention,
    prompt_attention,
)
from token_recycling import TokenRecycling


def reference(query, key, value, mask, scale):
    """The same in float64, one query head after the other."""
    query, key, value, mask = (x.double() for x in (query, key, value, mask))
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        products = query[:, head] @ key[:, head // group].transpose(1, 2) * scale + mask[:, 0]
        heads.append(products.softmax(-1) @ value[:, head // group])
    return torch.stack(heads, dim=2)


@pytest.mark.parametrize("heads, shared", [(6, 2), (8, 1), (4, 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_packed_heads_compute_the_same(heads, shared, batch):
    torch.manual_seed(heads * batch)
    q, slots, size = 9, 31, 16
    query = torch.randn(batch, heads, q, size)
    key, value = torch.randn(2, batch, shared, slots, size).unbind()
    mask = torch.zeros(batch, 1, q, slots).masked_fill_(
        torch.rand(batch, 1, q, slots) < 0.5, torch.finfo(torch.float32).min
    )
    module = torch.nn.Module()
    module.num_key_value_groups = heads // shared
    module.is_causal = True
    pack_queries(mask)
    call = (sdpa_attention_forward, module)
    found, _ = packed_attention(*call, query, key, value, mask, scaling=0.3)
    right = reference(query, key, value, mask, 0.3)
    assert found.shape == (batch, q, heads, size)
    assert (found - right).abs().max() < 1e-5
    if heads != shared:  # the control: queries packed in another order are not the same
        rolled = packed_attention(*call, query.roll(1, 2), key, value, mask, scaling=0.3)[0]
        assert (rolled - right).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "q"), [(0, 1), (0, 9), (1, 5), (40, 1), (40, 33)])
def test_tokens_of_a_prompt(before, q, dtype):
    batch, heads, shared, size = 2, 6, 2, 16
    draws = torch.Generator().manual_seed(q)
    query = torch.randn(batch, heads, q, size, generator=draws).to(dtype)
    key, value = (
        torch.randn(batch, shared, before + q, size, generator=draws).to(dtype) for _ in range(2)
    )
    visible = torch.ones(q, before + q, dtype=torch.bool).tril(before)
    mask = torch.zeros(1, 1, q, before + q).masked_fill_(~visible, -1e9)
    found = prompt_attention(query, key, value, before, 0.3).float()
    right = reference(query.float(), key.float(), value.float(), mask, 0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert (found - right).abs().max() < tolerance
    if before:  # the control
        wrong = prompt_attention(query, key[:, :, 1:], value[:, :, 1:], before - 1, 0.3).float()
        assert (wrong - right).abs().max() > 2 * tolerance


@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_pack_and_prompts_need_no_mask(graph, monkeypatch):
    model = make("qwen3", attn_implementation="sdpa")
    seen = []

    def stock(module, query, key, value, mask, **options):
        seen.append(-query.shape[2])
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def watched(module, query, *others, **options):
        seen.append(query.shape[2])
        return packed_attention(stock, module, query, *others, **options)

    for name in ("__enter__", "__exit__"):
        monkeypatch.setattr(PackedSdpa, name, lambda *about: None)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", watched)
    [prompt] = random_prompts([20])
    recycler = TokenRecycling(model, nodes=8, graph=graph)
    seen.clear()  # the probe's
    answer = recycler.generate(prompt, max_new_tokens=12)
    packed = [n for n in seen if n > 0 and seen.count(n) > seen.count(-n)]
    assert {n for n in packed if n <= 12}
    assert max(packed) == 20  # the prompt, whose mask is left out
    seen.clear()
    assert answer.token_ids == plain(model, prompt, 12)
    assert all(seen.count(n) == seen.count(-n) for n in seen)


def test_masks_of_others_are_left_to_what_was_there_before():
    before = AttentionInterface._global_mapping["sdpa"]
    seen = []

    def stock(*args, **options):
        seen.append(args)
        return None, None

    AttentionInterface.register("sdpa", stock)
    try:
        with PackedSdpa(), PackedSdpa():
            ours = AttentionInterface._global_mapping["sdpa"]
            mask = torch.zeros(1, 1, 3, 5)
            query, key = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 5, 8)
            ours(torch.nn.Module(), query, key, key, mask)
            assert len(seen) == 1
            packed = ours(torch.nn.Module(), query, key, key, pack_queries(mask))[0]
            assert packed.shape == (1, 3, 4, 8)
            assert len(seen) == 1
        assert AttentionInterface._global_mapping["sdpa"] is stock
    finally:
        AttentionInterface.register("sdpa", before)

"""Packed heads: the same attention, with every key read once."""

import pytest
import torch
from transformers import AttentionInterface

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling, attention
from token_recycling.attention import PackedHeads, packed_attention


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
    found, _ = packed_attention(module, query, key, value, mask, scaling=0.3)
    right = reference(query, key, value, mask, 0.3)
    assert found.shape == (batch, q, heads, size)
    assert (found - right).abs().max() < 1e-5
    if heads != shared:  # the control: queries packed in another order are not the same
        rolled = packed_attention(module, query.roll(1, 2), key, value, mask, scaling=0.3)[0]
        assert (rolled - right).abs().max() > 0.1


@pytest.mark.parametrize("engine", ["readable", "fused"])
def test_steps_pack_and_prompts_do_not(engine, monkeypatch):
    model = make("qwen3", attn_implementation="sdpa")
    seen = []

    def watched(module, query, key, *others, **options):
        if query.shape[1] != key.shape[1]:
            seen.append(query.shape[2])
        return packed_attention(module, query, key, *others, **options)

    monkeypatch.setattr("token_recycling.engine.BACKEND", "eager")
    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, watched)
    torch._dynamo.reset()
    [prompt] = random_prompts([20])
    recycler = TokenRecycling(model, tree="ranked-8", engine=engine)
    seen.clear()  # the probe's
    answer = recycler.generate(prompt, max_new_tokens=12)
    assert answer.token_ids == plain(model, prompt, 12)
    assert seen
    assert max(seen) <= 9
    assert model.config._attn_implementation == "sdpa"


def test_the_model_is_given_back_after_an_error():
    model = make("qwen3", attn_implementation="sdpa")
    packed = PackedHeads(model.config)
    with pytest.raises(ZeroDivisionError), packed:
        1 / (model.config._attn_implementation != attention.NAME)
    assert model.config._attn_implementation == "sdpa"
    eager = make("qwen3", attn_implementation="eager")
    with PackedHeads(eager.config):
        assert eager.config._attn_implementation == "eager"

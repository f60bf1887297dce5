"""A recycler leaves a model as it is, but for methods of ``generate`` while it is in use."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling, enable
from token_recycling.model.override import Override


def state(model):
    """All that a recycler could have left in a model, its Python file and Transformers."""
    return (
        [(type(module), dict(vars(module))) for module in model.modules()],
        dict(vars(modeling_llama)),
        dict(ALL_ATTENTION_FUNCTIONS._global_mapping),
    )


@pytest.mark.parametrize("options", [{}, {"float32_logits": True}, {"graph": True}])
def test_nothing_of_ours_is_left(options):
    model, (prompt,) = make("llama").to(torch.bfloat16), random_prompts([12])
    before = state(model)
    with enable(model, **options) as enabled:
        model.generate(torch.tensor([prompt]), max_new_tokens=10)
        stream = enabled.recycler.stream(prompt, max_new_tokens=10)
        next(stream)  # in the middle of an answer
        own = {name for name in vars(model) if name not in before[0][0][1]}
        assert {"generate", "_extract_generation_mode_kwargs"} <= own
        assert all(isinstance(vars(model)[name], Override) for name in own)
        assert state(model)[0][1:] == before[0][1:]
        assert state(model)[1:] == before[1:]
    assert state(model) == before
    enabled.recycler.generate(prompt, max_new_tokens=5)
    assert state(model) == before


def test_a_disabled_recycler_is_no_decoding_method():
    """Its streamers would wait for ever."""
    model, (prompt,) = make("llama"), random_prompts([12])
    (enabled := enable(model)).disable()
    with pytest.raises(ValueError, match="disabled"):
        model.generate(torch.tensor([prompt]), custom_generate=enabled.recycler)


def test_recyclers_of_the_same_model():
    """The first to go leaves the other what it needs."""
    model, (prompt,) = make("llama"), random_prompts([12])
    recycler, before = TokenRecycling(model), None
    enable(model).disable()
    found = model.generate(torch.tensor([prompt]), max_new_tokens=8, custom_generate=recycler)
    assert found[0, len(prompt) :].tolist() == plain(model, prompt, 8)
    assert before is None


def test_a_model_goes_at_once():
    """No cycle of references keeps it, or its shadow, until the collector runs."""
    model, (prompt,) = make("llama"), random_prompts([12])
    recycler = TokenRecycling(model)
    recycler.generate(prompt, max_new_tokens=5)
    gone = [weakref.ref(model.lm_head), weakref.ref(recycler.target.shadow.lm_head)]
    gone.append(weakref.ref(model.lm_head.weight))
    gc.disable()
    try:
        del model, recycler
        assert [one() for one in gone] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_an_enabled_model_have_the_stock_methods(copied):
    model, (prompt,) = make("llama"), random_prompts([12])
    with enable(model) as enabled:
        twin = copied(model)
        ids = torch.tensor([prompt])
        assert torch.equal(
            twin.generate(ids, max_new_tokens=8), model.generate(ids, max_new_tokens=8)
        )
    assert enabled.stats.new_tokens == 8

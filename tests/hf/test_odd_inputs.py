"""Inputs that ``generate`` takes although they are odd, and models that are."""

import warnings

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling, enable
from token_recycling.errors import PlainDecodingWarning, TokenRecyclingError

(PROMPT,) = random_prompts([9])
IDS = torch.tensor([PROMPT])


def outcome(call):
    try:
        return call().tolist()
    except TokenRecyclingError as error:
        raise AssertionError(str(error)) from error
    except Exception as error:
        return type(error), str(error)


def both(model, ids=IDS, **options):
    """What the model generates without us, and enabled."""
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | options
    stock = outcome(lambda: type(model).generate(model, ids.clone(), **options))
    with enable(model) as enabled, warnings.catch_warnings():
        warnings.simplefilter("ignore", PlainDecodingWarning)
        found = outcome(lambda: model.generate(ids.clone(), **options))
    return stock, found, enabled.stats.new_tokens


@pytest.mark.parametrize("first", [0, 1, -1, 0.5, 2, float("nan")])
def test_values_of_a_mask(first):
    mask = torch.ones(IDS.shape, dtype=torch.float32 if isinstance(first, float) else torch.long)
    mask[0, 0] = first
    stock, found, recycled = both(make("llama"), attention_mask=mask)
    assert found == stock
    assert (recycled > 0) == (first in (0, 1))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int32, torch.float32])
def test_token_ids_of_other_types(dtype):
    stock, found, recycled = both(make("llama"), IDS.to(dtype))
    assert found == stock
    assert (recycled > 0) == (dtype == torch.int32)


@pytest.mark.parametrize("token", [-100, -1, 96, 2**40])
def test_token_ids_outside_the_vocabulary(token):
    """Under a mask too, since the embedding looks them up."""
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    ids[0, 0], mask[0, 0] = token, 0
    stock, found, _ = both(make("llama"), ids, attention_mask=mask)
    assert found == stock
    assert stock[0] is IndexError


class Writes(LogitsProcessor):
    """Writes to the ids that it is given, once or at every token."""

    def __init__(self, always):
        self.always, self.calls = always, 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.always or self.calls == 1:
            ids[:, 0] = 7
        if self.always and ids.shape[1] > 11:
            ids[:, 10] = 8
        return scores


@pytest.mark.parametrize("always", [False, True])
def test_a_processor_that_writes_to_its_ids(always):
    model, given, results = make("llama"), [], []
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for used in (False, True):
        given.append(IDS.clone())
        processors = LogitsProcessorList([Writes(always)])
        if used:
            enabled = enable(model)
        results.append(model.generate(given[-1], logits_processor=processors, **options))
    assert enabled.stats.new_tokens == 8
    assert torch.equal(*results)
    assert torch.equal(*given)
    assert given[0][0, 0] == 7


def test_a_default_device_without_memory():
    model = make("llama")
    expected = plain(model, PROMPT, 12)
    torch.set_default_device("meta")
    try:
        recycler = TokenRecycling(model, strict=True)
        answer = recycler.generate(PROMPT, max_new_tokens=12)
    finally:
        torch.set_default_device("cpu")
    assert answer.token_ids == expected


@pytest.mark.parametrize("training", [False, True])
def test_a_model_that_quantize_dynamic_made(training):
    """Its layers scale a token by the others of its forward; their ``weight`` is a method."""
    model = torch.ao.quantization.quantize_dynamic(make("llama"), {torch.nn.Linear})
    model.train(training)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlainDecodingWarning)
        recycler = TokenRecycling(model)
        answer = recycler.generate(PROMPT, max_new_tokens=12)
    assert answer.token_ids == plain(model, PROMPT, 12)
    assert not answer.batch_invariant

"""200 random generation configurations: what ``enable`` gives is what stock ``generate`` gives."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from architectures import make
from letters import letters
from models import random_prompts
from token_recycling import PlainDecodingWarning, TokenRecyclingError, enable

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
TOKENS = st.integers(3, 95)
TOKENIZER = letters()
seen = Counter()


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def model(request):
    model = make(request.param)
    model.generation_config.pad_token_id = 0
    return model


def maybe(**options):
    """A dictionary with any of ``options``."""
    return st.fixed_dictionaries({}, optional=options)


sampling = maybe(
    temperature=st.floats(0.2, 2.0),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
    typical_p=st.floats(0.2, 0.99),
    epsilon_cutoff=st.floats(1e-4, 0.01),
    eta_cutoff=st.floats(1e-4, 0.01),
)
shared = maybe(
    repetition_penalty=st.floats(0.8, 2.0),
    no_repeat_ngram_size=st.integers(1, 4),
    bad_words_ids=st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=4),
    suppress_tokens=st.lists(TOKENS, max_size=20),
    begin_suppress_tokens=st.lists(TOKENS, max_size=20),
    sequence_bias=st.lists(
        st.tuples(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), st.floats(-5, 5)),
        min_size=1,
        max_size=3,
    ).map(dict),
    exponential_decay_length_penalty=st.tuples(st.integers(1, 10), st.floats(1.0, 1.5)),
    renormalize_logits=st.booleans(),
    remove_invalid_values=st.booleans(),
    min_new_tokens=st.integers(0, 20),
    forced_eos_token_id=TOKENS,
    encoder_repetition_penalty=st.floats(0.8, 1.5),
    encoder_no_repeat_ngram_size=st.integers(2, 4),
    guidance_scale=st.floats(1.1, 2.0),
    eos_token_id=st.one_of(TOKENS, st.lists(TOKENS, min_size=1, max_size=20, unique=True)),
    stop_strings=st.lists(st.text("abcdefgh.,x n", min_size=1, max_size=3), min_size=1, max_size=3),
    num_return_sequences=st.integers(1, 3),
    return_dict_in_generate=st.booleans(),
    output_scores=st.booleans(),
    output_logits=st.booleans(),
    max_time=st.just(1000.0),
    logits_to_keep=st.integers(0, 3),
    # older versions raise for a prompt of one token
    **({} if VERSION < (5, 12) else {"prefill_chunk_size": st.integers(2, 9)}),
)
odd = st.one_of(
    st.just({}),
    st.just({}),
    st.just({}),
    maybe(
        num_beams=st.integers(2, 3),
        cache_implementation=st.sampled_from(["static", "dynamic", "offloaded"]),
        prompt_lookup_num_tokens=st.integers(2, 5),
        output_hidden_states=st.just(True),
        penalty_alpha=st.just(0.6),
    ),
    st.just({"use_cache": False}),
)


@st.composite
def calls(draw):
    """Options, prompt lengths, seed, and whether the caller brings a cache."""
    options = {"max_new_tokens": draw(st.integers(1, 40)), "do_sample": draw(st.booleans())}
    if options["do_sample"]:
        options |= draw(sampling)
    # a few at a time: with all of them at once every text would end at its first token
    chosen = draw(shared)
    options |= dict(draw(st.permutations(sorted(chosen.items(), key=str)))[:4])
    if "exponential_decay_length_penalty" in options:
        options.setdefault("eos_token_id", 7)
    if not options["do_sample"]:
        options.pop("num_return_sequences", None)
    options |= draw(odd)
    lengths = draw(st.one_of(st.integers(1, 30).map(lambda n: [n]), st.lists(
        st.integers(1, 20), min_size=2, max_size=4)))  # fmt: skip
    return options, lengths, draw(st.integers(0, 2**31)), draw(st.booleans())


def padded(prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def outcome(generate, inputs, options, seed, own_cache):
    """Everything that a caller can see: result or error, cache, random state."""
    options = dict(options)
    if "stop_strings" in options:
        options["tokenizer"] = TOKENIZER
    cache = DynamicCache() if own_cache else None
    torch.manual_seed(seed)
    try:
        result = generate(**inputs, past_key_values=cache, **options)
    except Exception as error:
        return {"error": type(error)}
    found = {"random": torch.rand(2)}
    if cache is not None:
        found["cache"] = [layer.keys for layer in cache.layers]
    if isinstance(result, torch.Tensor):
        return found | {"sequences": result}
    for name in ("sequences", "scores", "logits"):
        found[name] = getattr(result, name)
    return found


def agree(a, b):
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(agree, a, b))
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=2e-3, rtol=1e-3)
    return a == b


@settings(
    max_examples=100,  # for each of the two models
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(calls())
def test_identical_or_refused_by_name(model, call):
    options, lengths, seed, own_cache = call
    inputs = padded(random_prompts(lengths, seed=seed))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected = outcome(type(model).generate.__get__(model), inputs, options, seed, own_cache)
    del caught
    with warnings.catch_warnings(record=True) as caught, enable(model) as enabled:
        warnings.simplefilter("always")
        found = outcome(model.generate, inputs, options, seed, own_cache)
    refused = [str(w.message) for w in caught if w.category is PlainDecodingWarning]
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert agree(value, found[name]), f"{name} differs: {options}"
    if "error" in found:
        seen["error"] += 1
    elif refused:
        assert len(refused) == 1
        assert enabled.stats.new_tokens == 0
        seen["refused"] += 1
    else:
        assert enabled.stats.new_tokens > 0
        seen["recycled"] += 1
        seen["accepted"] += enabled.stats.accepted
        with enable(model, strict=True):  # and strict has no reason to refuse it
            outcome(model.generate, inputs, options, seed, own_cache)


def test_most_of_them_were_recycled():
    """Runs after the one above: a refusal of everything would be identical too."""
    if not seen:
        pytest.skip("needs the test above")
    print(dict(seen))
    assert seen["recycled"] >= 50
    assert seen["refused"] >= 5
    assert seen["accepted"] > 50


def test_strict_raises_where_it_would_decode_plainly(model):
    inputs = padded(random_prompts([5]))
    with enable(model, strict=True), pytest.raises(TokenRecyclingError, match="beam search"):
        model.generate(**inputs, num_beams=2, max_new_tokens=5)

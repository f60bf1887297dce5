"""Tree attention on stock models: a tree's logits are those of its paths, and can be wrong."""

import copy
import gc
import warnings
import weakref

import pytest
import torch

from architectures import make
from models import REFUSED, SUPPORTED, plain, random_prompts
from skinny_kernels.windows import additive_masks
from token_recycling import PlainDecodingWarning, TokenRecycling, TokenRecyclingError
from token_recycling.drafting.templates import TreeShape, TreeTemplate
from token_recycling.model.fallback import PlainTarget
from token_recycling.model.probe import open_target, probe
from token_recycling.model.target import TreeTarget, prompt_fraction

TEMPLATE = TreeTemplate.load("ranked").first(8)


def tree_difference(model, target, prompts, prepare=lambda draft: draft):
    """Largest difference between tree logits and each path's logits, run alone and whole."""
    shape = TreeShape(TEMPLATE, "cpu")
    tokens = torch.randint(3, 96, (len(prompts), shape.size))
    draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    target.prefill(prompts)
    found = target.verify(prepare(draft))
    worst = 0.0
    for row, prompt in enumerate(prompts):
        for node in range(shape.size):
            path = shape.ancestors[node].nonzero()[:, 0]
            ids = torch.tensor([prompt + tokens[row, path].tolist()])
            with torch.inference_mode():
                right = model(input_ids=ids, use_cache=False).logits[0, -1]
            worst = max(worst, float((found[row, node] - right).abs().max()))
    return worst


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_tree_computes_its_paths(name, attention):
    model = make(name, attn_implementation=attention)
    target = open_target(model, strict=True)
    assert tree_difference(model, target, random_prompts([24])) < 2e-3
    assert tree_difference(model, target, random_prompts([24, 3, 40])) < 2e-3


BREAKS = {
    "the mask lets siblings see each other": ("mask", 0.05),
    "positions by slot instead of depth": ("positions", 0.05),
    "the window is forgotten": ("window", 0.05),
}


@pytest.mark.parametrize("what", BREAKS)
def test_negative_controls(what, monkeypatch):
    kind, least = BREAKS[what]
    model = make("mistral")
    target = open_target(model, strict=True)

    def broken(draft):
        from dataclasses import replace

        n = draft.tokens.shape[1]
        if kind == "mask":
            return replace(draft, ancestors=torch.ones_like(draft.ancestors).tril())
        if kind == "positions":
            return replace(draft, depths=torch.arange(n).expand_as(draft.depths))
        return draft

    if kind == "window":
        target.state.windows = {
            "full_attention": next(iter(target.windows.values()))._replace(rule="full")
        }
    assert tree_difference(model, target, random_prompts([40]), broken) > least


def test_a_wrong_commit_is_seen():
    """Without moving the accepted entries, or moving other ones, the next step is wrong."""
    model = make("llama")
    prompt = random_prompts([20])[0]
    shape = TreeShape(TEMPLATE, "cpu")
    tokens = torch.randint(3, 96, (1, shape.size))
    draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    leaf = shape.size - 1
    right_path = shape.ancestors[leaf].nonzero()[:, 0]
    # not the first slots: only a move can put these entries in place
    other = next(p for p in range(1, shape.size) if not shape.ancestors[leaf, p])
    wrong_path = right_path.clone()
    wrong_path[1] = other

    def after(path):
        target = TreeTarget(model)
        target.prefill([prompt])
        target.verify(draft)
        target.commit(path[None], [len(path)])
        chain = TreeShape(TreeTemplate.chain(1), "cpu")
        pair = torch.tensor([[5, 6]])
        return target.verify(chain.draft(pair, torch.ones_like(pair, dtype=torch.bool)))[0, 0]

    ids = torch.tensor([prompt + tokens[0, right_path].tolist() + [5]])
    with torch.inference_mode():
        right = model(input_ids=ids, use_cache=False).logits[0, -1]
    assert (after(right_path) - right).abs().max() < 2e-3
    assert (after(wrong_path) - right).abs().max() > 0.05


def test_the_cache_grows_and_is_moved_in_place():
    model = make("llama", max_position_embeddings=4096)
    target = TreeTarget(model)
    target.prefill(random_prompts([700]))
    capacity = target.cache.capacity
    assert capacity >= 700
    recycler = TokenRecycling(model)
    prompt = random_prompts([250])[0]
    answer = recycler.generate(prompt, max_new_tokens=60)
    assert answer.token_ids == plain(model, prompt, 60)
    keys = [layer.keys for layer in recycler.target.cache.layers]
    assert len({k.untyped_storage().data_ptr() for k in keys}) == 1  # one tensor for all layers


def test_prefill_in_chunks_is_prefill_at_once(monkeypatch):
    from token_recycling import defaults

    model = make("gemma3")
    target = TreeTarget(model)
    prompts = random_prompts([37, 12, 29])
    seen = []

    def learn_prompt(tokens, logits, valid):
        assert tokens.numel() <= 12
        seen.extend(tokens[valid].tolist())

    whole = target.prefill(prompts)
    monkeypatch.setattr(defaults, "PREFILL_CHUNK", 12)
    chunked = target.prefill(prompts, learn_prompt=learn_prompt)
    lean = target.prefill(prompts)
    assert (whole - chunked).abs().max() < 2e-3
    assert (whole - lean).abs().max() < 2e-3
    assert sorted(seen) == sorted(t for p in prompts for t in p)


def test_only_wanted_prompt_tokens_get_logits_and_not_many():
    """Logits over a large vocabulary cost a good part of reading a prompt with a small model."""
    model = make("llama")
    target = TreeTarget(model)
    prompt = random_prompts([60])
    seen = []

    def learn_prompt(tokens, logits, valid):
        seen.append((tokens[0].tolist(), logits.clone(), valid[0].tolist()))

    def prompt_mask(tokens):
        return tokens % 2 == 0

    expected = target.prefill(prompt, learn_prompt=learn_prompt)
    (_, whole, _), even = seen.pop(), [i for i, token in enumerate(prompt[0]) if token % 2 == 0]
    for share in (1.0, 0.1):
        target.prompt_fraction = share
        assert torch.allclose(
            target.prefill(prompt, learn_prompt=learn_prompt, prompt_mask=prompt_mask), expected
        )
        kept = even if share == 1 else even[-6:]
        tokens, logits, valid = seen.pop()
        assert tokens == [prompt[0][i] for i in kept]
        assert all(valid)
        assert torch.allclose(logits[0], whole[0, kept], atol=1e-5)
    target.prefill(prompt, learn_prompt=learn_prompt, prompt_mask=lambda tokens: None)
    assert not seen


def test_how_many_prompt_tokens_are_worth_their_logits():
    small, large = make("llama"), make("llama", vocab_size=4096)
    assert prompt_fraction(large) < 0.12 < prompt_fraction(small) <= 1


def test_eager_masks_are_additive():
    from skinny_kernels.windows import AttentionWindow

    visible = torch.tensor([[[True, False]]])
    mask = additive_masks(
        {"full_attention": AttentionWindow("full")},
        visible,
        torch.tensor([[1]]),
        torch.tensor([[0, 1]]),
        torch.float16,
    )
    assert mask.dtype == torch.float16
    assert mask[0, 0, 0].tolist() == [0.0, torch.finfo(torch.float16).min]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_branch_is_decoded_plainly_with_one_warning(name):
    model = make(name)
    with pytest.warns(PlainDecodingWarning) as caught:
        recycler = TokenRecycling(model)
    assert len([w for w in caught if w.category is PlainDecodingWarning]) == 1
    assert isinstance(recycler.target, PlainTarget)
    prompts = random_prompts([9, 5, 14])
    for prompt in prompts:
        answer = recycler.generate(prompt, max_new_tokens=30)
        assert answer.token_ids == plain(model, prompt, 30)
        assert answer.stats.mat == 1.0
    with pytest.raises(TokenRecyclingError, match="tree attention"):
        TokenRecycling(model, strict=True)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_plain_batch_is_padded_on_the_left(name):
    model = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recycler = TokenRecycling(model)
    prompts = random_prompts([9, 5, 14])
    answers = recycler.generate(prompts, max_new_tokens=25)
    assert [a.token_ids for a in answers] == [plain(model, p, 25) for p in prompts]


def test_the_probe_says_no_to_a_model_that_ignores_the_mask():
    model = make("llama")
    target = TreeTarget(model)
    assert probe(target) is None

    class Deaf(type(model)):
        def forward(self, **inputs):
            return super().forward(**{**inputs, "attention_mask": None})

    model.__class__ = Deaf
    target.adopt()
    assert "differ" in probe(target)


def test_the_probe_says_no_when_it_cannot_tell():
    model = make("llama")
    for layer in model.model.layers:  # nothing depends on the context
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    assert "inconclusive" in probe(TreeTarget(model))


def test_the_probe_leaves_the_configuration_alone():
    model = make("gemma3")
    open_target(model, strict=True)
    assert model.config.sliding_window == 16


def test_a_cache_can_be_copied():
    """Its layers belong to the copy."""
    target = TokenRecycling(make("llama")).target
    target.prefill([[5, 9, 2]])
    cache = copy.deepcopy(target.cache)
    assert cache.get_seq_length() == 3
    assert all(layer.extent is cache.extent for layer in cache.layers)
    assert cache.extent is not target.cache.extent
    target.reset()
    assert cache.get_seq_length() == 3


def test_a_cache_that_is_not_needed_is_freed_at_once():
    """Without the garbage collector: a server drops caches faster than that runs."""
    target = TokenRecycling(make("llama")).target
    gc.disable()
    try:
        target.prefill([[5, 9, 2]])
        kept = weakref.ref(target.cache.copy(0).layers[0].keys.untyped_storage())
        assert kept() is None
        layer = weakref.ref(target.cache.layers[0])
        target.reset()
        assert layer() is None
    finally:
        gc.enable()


def test_the_warning_names_the_callers_line():
    with pytest.warns(PlainDecodingWarning) as caught:
        TokenRecycling(make("bloom"))
    assert caught[0].filename == __file__

"""Copies are independent, and nothing that threads or libraries share is switched under them."""

from __future__ import annotations

import copy
import gc
import operator
import pickle
import threading
import time
import types
import weakref

import pytest
import torch
from torch.nn import functional

from architectures import make
from models import plain, random_prompts
from skinny_kernels import sdpa
from token_recycling import TokenRecycling, TokenRecyclingError, enable
from token_recycling.graph.decoder import GraphDecoder

[PROMPT] = random_prompts([12])
IDS = torch.tensor([PROMPT])


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


class TestShallowCopy:
    """``copy.copy`` shares the model, as two recyclers of one model do."""

    @pytest.mark.parametrize("options", [{}, {"drafter": "paper"}])
    def test_in_the_middle_of_a_stream(self, options):
        model = make("llama")
        recycler = TokenRecycling(model, **options)
        other = random_prompts([20])[0]
        expected = plain(model, PROMPT, 40), plain(model, other, 40)
        stream = recycler.stream(PROMPT, max_new_tokens=40)
        begun = [next(stream).token_id for _ in range(6)]
        twin = copy.copy(recycler)
        assert twin.generate(other, max_new_tokens=40).token_ids == expected[1]
        assert begun + [chunk.token_id for chunk in stream] == expected[0]

    def test_what_one_learns_the_other_does_not(self):
        recycler = TokenRecycling(make("llama"))
        recycler.generate(PROMPT, max_new_tokens=20)
        rows = recycler.matrix.candidates.clone()
        twin = copy.copy(recycler)
        assert twin.model is recycler.model
        assert twin.drafter.matrix is twin.matrix is not recycler.matrix
        assert torch.equal(twin.matrix.candidates, rows)
        twin.reset()
        assert torch.equal(recycler.matrix.candidates, rows)
        assert recycler.stats.new_tokens == 20 == twin.stats.new_tokens
        twin.generate(PROMPT, max_new_tokens=5)
        assert recycler.stats.new_tokens == 20


def test_a_reset_from_another_thread_waits_for_the_step():
    """Clearing the cache in the middle of a forward would end in an error of PyTorch's."""
    recycler = TokenRecycling(make("llama"))
    errors = []

    def answer():
        for _ in range(15):
            try:
                recycler.generate(PROMPT, max_new_tokens=20)
            except TokenRecyclingError:
                pass
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    while thread.is_alive():
        recycler.reset()
    thread.join()
    assert errors == []


def test_a_reset_comes_after_a_step_that_has_begun():
    recycler = TokenRecycling(make("llama"))
    begun, order = threading.Event(), []
    verify = recycler.target.verify

    def slow(draft):
        if not begun.is_set():
            begun.set()
            time.sleep(0.5)
            order.append("step")
        return verify(draft)

    recycler.target.verify = slow
    thread = threading.Thread(target=lambda: recycler.generate(PROMPT, max_new_tokens=20))
    thread.start()
    assert begun.wait(30)
    recycler.reset()
    order.append("reset")
    thread.join()
    assert order == ["step", "reset"]


def test_a_reset_inside_an_answer_does_not_wait_for_itself():
    recycler = TokenRecycling(make("llama"))
    with pytest.raises(TokenRecyclingError, match="was reset"):
        recycler.generate(PROMPT, max_new_tokens=20, on_step=lambda step: recycler.reset())


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
class TestCopies:
    @pytest.mark.parametrize("drafter", ["adaptive", "paper", "prompt-lookup", "none"])
    @pytest.mark.parametrize(
        "options",
        [{}, {"float32_logits": True}, pytest.param({"graph": True}, marks=pytest.mark.slow)],
    )
    def test_a_recycler(self, copied, drafter, options):
        model = make("llama")
        recycler = TokenRecycling(model, drafter=drafter, **options)
        expected = recycler.generate(PROMPT, max_new_tokens=30).token_ids
        rows = recycler.matrix.candidates.clone()
        twin = copied(recycler)
        assert twin.model is not model
        assert torch.equal(twin.matrix.candidates, rows)
        assert twin.generate(PROMPT, max_new_tokens=30).token_ids == expected
        # independent: what one forgets or is trained on, the other is not
        twin.reset()
        for weight in twin.model.parameters():
            weight.data.mul_(-1)
        assert torch.equal(recycler.matrix.candidates, rows)
        again = recycler.generate(PROMPT, max_new_tokens=30, keep_context=True)
        assert again.token_ids == expected == plain(model, PROMPT, 30)
        other = twin.generate(PROMPT, max_new_tokens=30).token_ids
        assert other == plain(twin.model, PROMPT, 30) != expected

    def test_float32_logits_of_a_copy_are_float32(self, copied):
        recycler = TokenRecycling(make("llama").bfloat16(), float32_logits=True)
        twin = copied(recycler)
        with twin.target.lm_head:
            assert twin.model(IDS).logits.dtype == torch.float32
            assert recycler.model(IDS).logits.dtype == torch.bfloat16
        assert twin.model(IDS).logits.dtype == torch.bfloat16

    def test_the_middle_of_a_stream(self, copied, bundled):
        recycler = TokenRecycling(bundled.model, bundled.tokenizer)
        expected = recycler.generate("The king", max_new_tokens=20).token_ids
        stream = recycler.stream("The king", max_new_tokens=20)
        first = [next(stream).token_id for _ in range(3)]
        twin = copied(recycler)
        assert twin.generate("The king", max_new_tokens=20).token_ids == expected
        assert first + [chunk.token_id for chunk in stream] == expected

    @pytest.mark.parametrize("on", [True, False])
    def test_an_enabled_model(self, copied, on):
        model = make("llama")
        enabled = enable(model)
        if not on:
            enabled.disable()
        twin = copied(enabled)
        mirror = twin.recycler.model
        assert mirror is not model
        assert ("generate" in mirror.__dict__) == on
        found = mirror.generate(IDS, max_new_tokens=20, pad_token_id=0)
        assert found[0, 12:].tolist() == plain(model, PROMPT, 20)
        assert (twin.stats.new_tokens > 0) == on
        assert enabled.stats.new_tokens == 0 or on
        twin.disable()
        assert "generate" not in mirror.__dict__
        assert ("generate" in model.__dict__) == on

    def test_a_model_with_a_recycler(self, copied):
        model = make("llama")
        recycler = TokenRecycling(model, float32_logits=True)
        model.recycler = types.SimpleNamespace(it=recycler)
        twin = copied(model)
        assert twin.recycler.it.model is twin
        assert twin.recycler.it.generate(PROMPT, max_new_tokens=20).token_ids == plain(
            model, PROMPT, 20
        )


def test_a_recycler_does_not_keep_its_model_alive():
    model = make("llama")
    gone = weakref.ref(model)
    gc.disable()
    try:
        recycler = TokenRecycling(model, float32_logits=True)
        recycler.generate(PROMPT, max_new_tokens=5)
        del recycler, model
        gc.collect()
        assert gone() is None
    finally:
        gc.enable()


def concurrently(*calls):
    errors = []

    def run(call):
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class TestTwoRecyclersOfOneModel:
    def test_in_two_threads(self):
        model = make("qwen3", attn_implementation="sdpa")
        prompts = random_prompts([9] * 8, seed=6)
        expected = [plain(model, prompt, 30) for prompt in prompts]
        found = {}

        def run(name, drafter):
            recycler = TokenRecycling(model, drafter=drafter, strict=True)
            for i, prompt in enumerate(prompts):
                found[name, i] = recycler.generate(prompt, max_new_tokens=30).token_ids
                TokenRecycling(model, strict=True)  # made while the other one decodes

        concurrently(lambda: run("a", "adaptive"), lambda: run("b", "paper"))
        for name in "ab":
            assert [found[name, i] for i in range(8)] == expected

    def test_no_setting_is_flipped_while_a_forward_runs(self, monkeypatch):
        """Seen from inside of the attention function, and from inside of a linear layer."""
        model = make("qwen3", attn_implementation="sdpa")
        recycler = TokenRecycling(model, nodes=8, float32_logits=True)
        outside = self.settings(model)
        seen = []
        for name in ("scaled_dot_product_attention", "cpu.attend"):  # whichever is used here
            path = f"skinny_kernels.sdpa.{name}"
            stock = operator.attrgetter(name)(sdpa)
            monkeypatch.setattr(
                path,
                lambda *a, stock=stock, **kw: seen.append(self.settings(model)) or stock(*a, **kw),
            )
        recycler.generate(PROMPT, max_new_tokens=10)
        assert seen
        assert all(inside == outside for inside in seen)

    @staticmethod
    def settings(model):
        forwards = [module.__dict__.get("forward") for module in model.modules()]
        return (
            model.config._attn_implementation,
            functional.linear,
            functional.scaled_dot_product_attention,
            forwards,
            model.training,
        )

    def test_float32_logits_are_those_of_the_thread_that_asked(self):
        model = make("llama").bfloat16()
        exact = TokenRecycling(model, float32_logits=True).target.lm_head
        dtypes, inside, done = [], threading.Event(), threading.Event()

        def other():
            inside.wait()
            dtypes.append(model(IDS).logits.dtype)
            done.set()

        def asking():
            with exact:
                inside.set()
                done.wait()
                dtypes.append(model(IDS).logits.dtype)

        concurrently(other, asking)
        assert dtypes == [torch.bfloat16, torch.float32]


def test_a_patch_of_another_library_survives(monkeypatch):
    """Put in during a forward, as one that counts operations would."""
    model = make("llama")
    recycler = TokenRecycling(model, nodes=4)
    stock = functional.linear
    products = []

    def patched(*args):
        products.append(args)
        return stock(*args)

    def patch(step):
        monkeypatch.setattr(functional, "linear", patched)

    norm = model.model.norm.register_forward_hook(lambda *a: patch(None))
    expected = recycler.generate(PROMPT, max_new_tokens=10).token_ids
    norm.remove()
    assert functional.linear is patched
    products.clear()
    assert plain(model, PROMPT, 10) == expected
    assert products


class Adapter(torch.nn.Module):
    """As peft's, which are switched by an attribute."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.on = base, True

    def forward(self, inputs):
        found = self.base_layer(inputs)
        return found * 1.5 if self.on else found


@pytest.mark.parametrize("blind", [False, True])
def test_adapters_that_are_switched_under_a_graph(blind, monkeypatch):
    """The control: nobody sees that they were."""
    model = make("llama")
    recycler = TokenRecycling(model, nodes=8, graph=True)
    recycler.generate(PROMPT, max_new_tokens=10)
    assert isinstance(recycler.session._graph, GraphDecoder)
    layer = model.model.layers[0].mlp
    adapter = layer.up_proj = Adapter(layer.up_proj)
    same = []
    for on in (True, False, True):
        adapter.on = on
        answer = recycler.generate(PROMPT, max_new_tokens=20)
        same.append(answer.token_ids == plain(model, PROMPT, 20))
        if blind:
            monkeypatch.setattr(recycler.target.fingerprint, "change", lambda: None)
    assert same == [True, not blind, True]

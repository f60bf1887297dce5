"""What a call asks for: one examination for ``recycler.generate`` and for ``enable``."""

from __future__ import annotations

import threading
import time
import warnings

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from architectures import make
from models import plain, random_prompts
from skinny_kernels.windows import AttentionWindow
from token_recycling import (
    PlainDecodingWarning,
    TokenRecycling,
    TokenRecyclingError,
    enable,
)

[PROMPT] = random_prompts([12])
PROMPTS = random_prompts([12, 7, 9, 12], seed=3)
IDS = torch.tensor([PROMPT])


def padded(prompts):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}


def stock(model, **options):
    return type(model).generate(model, **options)


@pytest.fixture
def model():
    return make("llama")


@pytest.fixture
def recycler(model):
    return TokenRecycling(model, nodes=8)


class TestEndOfSequence:
    @pytest.mark.parametrize(
        "kind",
        [int, lambda x: [x], lambda x: (x, 95), lambda x: torch.tensor([x]), torch.tensor,
         lambda x: np.array([x, 95]), np.int64, lambda x: torch.tensor([[x, 95]])],
    )  # fmt: skip
    @pytest.mark.parametrize("where", ["option", "config", "model"])
    def test_ids_in_every_form(self, kind, where, model, recycler):
        eos = plain(model, PROMPT, 30)[9]
        expected = plain(model, PROMPT, 30, eos_token_id=[eos, 95])
        given = kind(eos)
        options = {}
        if where == "option":
            options = {"eos_token_id": given}
        elif where == "config":
            options = {"generation_config": GenerationConfig(eos_token_id=given)}
        else:
            model.generation_config.eos_token_id = given
        try:
            ids = torch.tensor([PROMPT])
            stock(model, input_ids=ids, max_new_tokens=30, pad_token_id=0, **options)
        except (TypeError, ValueError, AttributeError):
            # What Transformers itself does not take is refused in one line.
            with pytest.raises(TokenRecyclingError, match="refuses"):
                recycler.generate(PROMPT, max_new_tokens=30, **options)
            return
        answer = recycler.generate(PROMPT, max_new_tokens=30, **options)
        assert answer.token_ids == expected
        assert answer.finish_reason == "eos"


class Counting(LogitsProcessor):
    """Remembers how often it was asked, and bans another token each time."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % scores.shape[1]] = -torch.inf
        return scores


def allowed(row, ids):
    return list(range(3, 50)) if row == 0 else list(range(50, 95))


ALONE = {
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": allowed},
    "a stateful processor": lambda: {"logits_processor": LogitsProcessorList([Counting()])},
}


class TestWhatIsServed:
    @pytest.mark.parametrize("what", ALONE)
    def test_one_prompt_is_as_generate_has_it(self, what, model, recycler):
        expected = plain(model, PROMPT, 20, **ALONE[what]())
        assert recycler.generate(PROMPT, max_new_tokens=20, **ALONE[what]()).token_ids == expected

    @pytest.mark.parametrize("what", ALONE)
    def test_a_batch_is_refused_by_name(self, what, model, recycler):
        with pytest.raises(TokenRecyclingError, match=r"Processor|Counting"):
            recycler.generate(PROMPTS, max_new_tokens=20, **ALONE[what]())
        call = {**padded(PROMPTS), "max_new_tokens": 20}
        expected = stock(model, **call, **ALONE[what]())
        with enable(model), pytest.warns(PlainDecodingWarning, match="whole batch"):
            assert torch.equal(model.generate(**call, **ALONE[what]()), expected)

    @pytest.mark.parametrize(
        "option, value",
        [
            ("inputs_embeds", torch.zeros(1, 3, 32)),
            ("attention_mask", torch.tensor([[0] * 6 + [1] * 6])),
            ("position_ids", torch.arange(12)[None] + 3),
            ("num_return_sequences", 2),
            ("past_key_values", ()),
            ("output_scores", True),
        ],
    )
    def test_options_that_are_not_kept_are_refused_by_name(self, recycler, option, value):
        with pytest.raises(TokenRecyclingError, match=option):
            recycler.generate(PROMPT, max_new_tokens=5, **{option: value})

    @pytest.mark.parametrize(
        "options, reason",
        [
            ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
            ({"dola_layers": "high"}, "dola"),
            ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
            ({"assistant_early_exit": 2}, "assistant|assisted|refuses"),
            ({"prompt_lookup_num_tokens": 3}, "assisted"),
            ({"num_beams": 2}, "beam"),
            ({"token_healing": True}, "token_healing|token healing|refuses"),
        ],
    )
    @pytest.mark.parametrize("where", ["option", "model"])
    def test_methods_inside_a_configuration_are_refused_by_name(
        self, model, recycler, options, reason, where
    ):
        given = {}
        if where == "option":
            given = {"generation_config": GenerationConfig(**options)}
        else:
            for name, value in options.items():
                setattr(model.generation_config, name, value)
        given = given | ({"temperature": 1.0} if "do_sample" in options else {})
        with pytest.raises(TokenRecyclingError, match=f"(?i){reason}"):
            recycler.generate(PROMPT, max_new_tokens=5, **given)

    @pytest.mark.parametrize("where", ["option", "config"])
    def test_time_is_kept(self, model, recycler, where):
        options = {"max_time": 1e-9}
        if where == "config":
            options = {"generation_config": GenerationConfig(**options)}
        answer = recycler.generate(PROMPT, max_new_tokens=20, **options)
        assert answer.token_ids == plain(model, PROMPT, 1)
        assert answer.finish_reason == "length"
        with pytest.raises(TokenRecyclingError, match="MaxTime"):
            recycler.generate(PROMPTS, max_new_tokens=20, **options)

    def test_stop_strings_of_the_models_own_configuration(self, bundled):
        recycler = TokenRecycling(bundled.model, bundled.tokenizer, nodes=8)
        whole = recycler.generate("Once upon a time", max_new_tokens=40)
        stop = whole.text.split()[4]
        recycler.model.generation_config.stop_strings = [stop]
        try:
            answer = recycler.generate("Once upon a time", max_new_tokens=40)
            ids = bundled.tokenizer("Once upon a time", return_tensors="pt")
            expected = stock(
                bundled.model, **ids, max_new_tokens=40, tokenizer=bundled.tokenizer,
                do_sample=False,
            )  # fmt: skip
        finally:
            recycler.model.generation_config.stop_strings = None
        assert answer.token_ids == expected[0, ids.input_ids.shape[1] :].tolist()
        assert answer.finish_reason == "stop"

    def test_numbers_of_numpy(self, model, recycler):
        answer = recycler.generate(
            PROMPT, max_new_tokens=np.int64(9), temperature=np.float32(0), seed=np.int64(3)
        )
        assert answer.token_ids == plain(model, PROMPT, 9)
        recycler.generate(PROMPT, max_new_tokens=5, temperature=np.float32(0.7), top_k=np.int32(4))


class AllDone(StoppingCriteria):
    """As lm_eval's: a batch ends once every row has written a token of ``ends``."""

    def __init__(self, rows, start, ends):
        self.done, self.start, self.ends, self.seen = [False] * rows, start, ends, []

    def __call__(self, ids, scores, **_):
        self.seen.append(ids.clone())
        for row, tokens in enumerate(ids[:, self.start :].tolist()):
            self.done[row] |= bool(self.ends.intersection(tokens))
        return all(self.done)


class EachRow(AllDone):
    """Rows end one by one, as in newer versions."""

    def __call__(self, ids, scores, **_):
        super().__call__(ids, scores)
        return torch.tensor(self.done)


@pytest.mark.parametrize("kind", [AllDone, EachRow])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("full", [False, True])
def test_criteria_that_look_at_the_whole_batch_are_asked_column_by_column(kind, sample, seed, full):
    """As lm_eval's batches ask; the rows that are ahead hold their tokens back."""
    model = make("llama")
    prompts = random_prompts([12, 7, 9, 12], seed=seed)
    call = {**padded(prompts), "max_new_tokens": 30, "do_sample": sample}
    call |= {"eos_token_id": 17, "return_dict_in_generate": full}
    ends = {5 + seed, 20, 33, 41, 60, 77}

    def run(generate):
        criterion = kind(4, 12, ends)
        torch.manual_seed(seed)
        found = generate(**call, stopping_criteria=StoppingCriteriaList([criterion]))
        return found, criterion.seen, torch.rand(2)

    expected, asked, state = run(lambda **options: stock(model, **options))
    with enable(model, strict=True, nodes=16) as enabled:
        run(model.generate)
        found, seen, after = run(model.generate)
        assert enabled.stats.accepted > 0 or sample
    assert torch.equal(state, after)
    assert len(seen) == len(asked)
    assert all(map(torch.equal, seen, asked))
    if full:
        for ours, theirs in zip(found.past_key_values.layers, expected.past_key_values.layers):
            length = theirs.keys.shape[2]
            assert ours.keys.shape[2] == length
        found, expected = found.sequences, expected.sequences
    assert torch.equal(found, expected)


@pytest.mark.parametrize("sample", [False, True])
def test_without_an_end_a_row_goes_on_until_all_have_ended(sample):
    """Plain decoding pads rows only where the call has an end-of-sequence id."""
    model = make("llama")
    model.generation_config.eos_token_id = None
    prompts = random_prompts([9, 5, 7], seed=8)
    call = {**padded(prompts), "max_new_tokens": 30, "do_sample": sample}

    def run(generate):
        criterion = EachRow(3, 9, set(range(20, 60)))
        torch.manual_seed(1)
        found = generate(**call, stopping_criteria=StoppingCriteriaList([criterion]))
        return found, criterion.seen, torch.rand(2)

    expected, asked, state = run(lambda **options: stock(model, **options))
    with enable(model, strict=True, nodes=16):
        run(model.generate)
        found, seen, after = run(model.generate)
    assert torch.equal(found, expected)
    assert len(seen) == len(asked)
    assert all(map(torch.equal, seen, asked))
    assert torch.equal(state, after)


class TestOtherConfigurations:
    """What the probe saw is not what the model is now."""

    @pytest.mark.parametrize("name, size", [("mistral", 6), ("mistral", None), ("gemma3", 5)])
    def test_another_window(self, name, size):
        model = make(name)
        model.generation_config.pad_token_id = 0
        [prompt] = random_prompts([40])
        ids = torch.tensor([prompt])
        recycler = TokenRecycling(model, strict=True)
        with enable(model) as enabled:
            model.config.sliding_window = size
            expected = stock(model, input_ids=ids, max_new_tokens=20, do_sample=False)
            assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
            assert enabled.stats.new_tokens == 20
        answer = recycler.generate(prompt, max_new_tokens=20)
        assert answer.token_ids == expected[0, len(prompt) :].tolist()

    def test_other_positions(self, model):
        recycler = TokenRecycling(model, strict=True)
        model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        model.config.rope_scaling = model.config.rope_parameters
        model.config.max_position_embeddings = 32
        answer = recycler.generate(PROMPT, max_new_tokens=50)
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == 32 - len(PROMPT)  # those that the model has positions for

    def test_making_a_recycler_switches_nothing(self, monkeypatch):
        """Seen from a forward of the probe, as another thread would see it."""
        model = make("mistral").train()
        model.model.layers[0].eval()

        def state():
            return model.config.sliding_window, [m.training for m in model.modules()]

        before, seen = state(), []
        with monkeypatch.context() as patch:
            forward = type(model.model.layers[1].mlp).forward

            def watched(self, x):
                seen.append(state())
                return forward(self, x)

            patch.setattr(type(model.model.layers[1].mlp), "forward", watched)
            patch.setattr("token_recycling.model.fingerprint.foreign_code", lambda model: None)
            TokenRecycling(model, strict=True)
        assert seen
        assert all(one == before for one in seen)
        assert state() == before

    def test_the_probe_still_sees_windows(self, monkeypatch):
        """The control: a target that forgets them is refused."""
        monkeypatch.setattr(
            "token_recycling.model.state.attention_windows",
            lambda config: {"sliding_attention": AttentionWindow("full")},
        )
        with pytest.raises(TokenRecyclingError, match="differ"):
            TokenRecycling(make("mistral"), strict=True)


class TestTrainingMode:
    def test_noise_that_comes_later_is_seen(self, model):
        model.train()
        with enable(model) as enabled:
            model.generate(IDS, max_new_tokens=5, pad_token_id=0)
            assert enabled.stats.new_tokens == 5

            class Noisy(torch.nn.Embedding):
                def forward(self, ids):
                    out = super().forward(ids)
                    return out + torch.rand_like(out) if self.training else out

            model.get_input_embeddings().__class__ = Noisy
            with pytest.warns(PlainDecodingWarning, match="same text vary"):
                model.generate(IDS, max_new_tokens=5, pad_token_id=0)

    def test_without_dropout_it_computes_the_same(self):
        model = make("llama").train()
        expected = plain(model, PROMPT, 30)
        with enable(model, strict=True) as enabled:
            assert model.training
            found = model.generate(IDS, max_new_tokens=30, pad_token_id=0)
            assert enabled.stats.new_tokens == 30
        assert found[0, 12:].tolist() == expected
        assert model.training

    def test_enabled_before_training_begins(self):
        model = make("llama")
        with enable(model, strict=True) as enabled:
            model.train()
            model.generate(IDS, max_new_tokens=10, pad_token_id=0)
            assert enabled.stats.new_tokens == 10

    def test_a_single_module_that_trains_is_seen(self):
        """An adapter's dropout, say, in a model in evaluation."""
        model = make("llama")
        model.model.layers[0].mlp = torch.nn.Sequential(
            model.model.layers[0].mlp, torch.nn.Dropout(0.5)
        )
        model.eval()
        with enable(model):
            model.generate(IDS, max_new_tokens=3, pad_token_id=0)
            model.model.layers[0].mlp.train()
            with pytest.warns(PlainDecodingWarning, match="dropout"):
                model.generate(IDS, max_new_tokens=3, pad_token_id=0)

    @pytest.mark.parametrize("what", ["checkpointing", "batch norm", "noise", "config"])
    def test_other_ways_to_be_different(self, what):
        model = make("llama", attention_dropout=0.2 if what == "config" else 0.0)
        with enable(model):
            if what == "checkpointing":
                model.gradient_checkpointing_enable()
            elif what == "batch norm":
                model.model.extra = torch.nn.BatchNorm1d(4)
            elif what == "noise":

                class Noisy(torch.nn.Module):
                    def __init__(self, norm):
                        super().__init__()
                        self.norm = norm

                    def forward(self, hidden):
                        hidden = self.norm(hidden)
                        return hidden + torch.randn_like(hidden) if self.training else hidden

                model.model.norm = Noisy(model.model.norm)
            model.train()
            with pytest.warns(PlainDecodingWarning, match="training mode"):
                model.generate(IDS, max_new_tokens=3, pad_token_id=0)


class TestContinuousBatching:
    @pytest.mark.parametrize("name", ["generate_batch", "init_continuous_batching"])
    def test_it_is_said_or_refused(self, model, monkeypatch, name):
        if not hasattr(type(model), name):
            pytest.skip("not in this version")
        monkeypatch.setattr(type(model), name, lambda self, *args, **kw: ("stock", args))
        with enable(model), pytest.warns(PlainDecodingWarning, match="continuous batching"):
            assert getattr(model, name)([[5]]) == ("stock", ([[5]],))
        assert name not in model.__dict__
        with enable(model, strict=True), pytest.raises(TokenRecyclingError, match="continuous"):
            getattr(model, name)([[5]])
        assert getattr(model, name)([[5]]) == ("stock", ([[5]],))


class Slow(StoppingCriteria):
    """Lets other threads in while a call is under way."""

    def __call__(self, ids, scores, **_):
        time.sleep(0.002)
        return torch.zeros(len(ids), dtype=torch.bool)


class TestThreads:
    def run(self, calls):
        results = [None] * len(calls)

        def one(i):
            try:
                results[i] = calls[i]()
            except Exception as error:
                results[i] = error

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def test_calls_wait_for_their_turn(self, model):
        prompts = random_prompts([9] * 6, seed=4)
        expected = [plain(model, prompt, 20) for prompt in prompts]

        def call(prompt):
            return model.generate(
                torch.tensor([prompt]),
                max_new_tokens=20,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Slow()]),
            )[0, 9:].tolist()

        with warnings.catch_warnings(), enable(model, strict=True) as enabled:
            warnings.simplefilter("error", PlainDecodingWarning)
            found = self.run([lambda p=p: call(p) for p in prompts])
            assert enabled.stats.new_tokens == 120
        assert found == expected

    def test_without_a_queue_they_are_decoded_plainly(self, model):
        prompts = random_prompts([9] * 4, seed=4)
        expected = [plain(model, prompt, 20) for prompt in prompts]
        with enable(model, queue=False) as enabled, warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            found = self.run(
                [
                    lambda p=p: model.generate(
                        torch.tensor([p]), max_new_tokens=20, pad_token_id=0,
                        stopping_criteria=StoppingCriteriaList([Slow()]),
                    )[0, 9:].tolist()
                    for p in prompts
                ]
            )  # fmt: skip
            assert enabled.stats.new_tokens < 80
        assert found == expected

    def test_answers_of_a_recycler_too(self, model, recycler):
        prompts = random_prompts([9] * 6, seed=4)
        expected = [plain(model, prompt, 20) for prompt in prompts]
        options = {"max_new_tokens": 20, "on_step": lambda step: time.sleep(0.002)}
        slow = [lambda p=p: recycler.generate(p, **options) for p in prompts]
        assert [answer.token_ids for answer in self.run(slow)] == expected

    def test_the_lock_comes_in_the_order_of_asking(self):
        from token_recycling.util.lock import FairLock

        lock, order = FairLock(), []
        asked = threading.Event()

        def one(i):
            with lock.acquired(wait=True) as mine:
                assert mine
                order.append(i)

        with lock.acquired(wait=True):
            threads = []
            for i in range(8):
                thread = threading.Thread(target=one, args=(i,))
                thread.start()
                while len(lock._queue) <= i + 1:
                    asked.wait(0.001)
                threads.append(thread)
        for thread in threads:
            thread.join()
        assert order == list(range(8))

    def test_a_call_inside_a_call_does_not_wait_for_itself(self, model):
        inner = []

        class Nested(StoppingCriteria):
            def __call__(self, ids, scores, **_):
                if not inner:
                    inner.append(None)
                    inner[0] = model.generate(ids, max_new_tokens=3, pad_token_id=0)
                return torch.zeros(len(ids), dtype=torch.bool)

        with enable(model), pytest.warns(PlainDecodingWarning, match="still generating"):
            found = model.generate(
                IDS, max_new_tokens=10, pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Nested()]),
            )  # fmt: skip
        assert found[0, 12:].tolist() == plain(model, PROMPT, 10)
        assert inner[0].shape[1] == 16


class Holder:
    """Something that has a model inside under a name of its own."""

    def __init__(self, **names):
        self.__dict__.update(names)


class TestModelInside:
    def test_where_it_is_clear_it_is_taken(self, bundled):
        from transformers import pipeline

        model = bundled.model
        writer = pipeline("text-generation", model=model, tokenizer=bundled.tokenizer)
        peft_like = Holder(get_base_model=lambda: model)
        for given in (
            writer,
            Holder(model=model),
            Holder(model=Holder(module=model)),
            torch.compile(model),
            peft_like,
        ):
            with enable(given) as enabled:
                assert enabled.recycler.model is model
            assert "generate" not in model.__dict__

    def test_a_pipeline_recycles(self, bundled):
        from transformers import pipeline

        writer = pipeline("text-generation", model=bundled.model, tokenizer=bundled.tokenizer)
        expected = writer("Once upon a time", max_new_tokens=20, do_sample=False)
        with enable(writer, strict=True) as enabled:
            assert writer("Once upon a time", max_new_tokens=20, do_sample=False) == expected
            assert enabled.stats.new_tokens == 20

    def test_else_the_attribute_is_named(self, model):
        with pytest.raises(TokenRecyclingError, match=r"pass its \.writer"):
            enable(Holder(writer=model))
        with pytest.raises(TokenRecyclingError, match=r"\.one or \.two"):
            enable(Holder(one=model, two=model))
        with pytest.raises(TokenRecyclingError, match="from_pretrained"):
            enable("path/to/a/model")
        with pytest.raises(TokenRecyclingError, match="not a Transformers model"):
            enable(None)

"""Inside Transformers: ``enable``, ``custom_generate``, streamers, caches from turn to turn."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from architectures import make
from models import random_prompts
from token_recycling import (
    PlainDecodingWarning,
    TokenRecycling,
    TokenRecyclingError,
    enable,
)
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.util.tokens import NO_TOKEN

TEXTS = ["Once upon a time there was a king", "The fox", "Tom has 12 marbles. He", "A"]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL, padding_side="left")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32).eval()


@pytest.fixture
def batch(tokenizer):
    return tokenizer(TEXTS, return_tensors="pt", padding=True)


@pytest.fixture
def single(tokenizer):
    return tokenizer(TEXTS[0], return_tensors="pt")


@pytest.fixture(autouse=True)
def _stock_afterwards(model):
    yield
    assert "generate" not in model.__dict__


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=2e-3)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def stock_script(model, tokenizer, batch, single):
    """What people do with a model; nothing here knows of Token Recycling."""
    results = {}
    torch.manual_seed(5)
    results["greedy batch"] = model.generate(**batch, max_new_tokens=60)
    results["sampled batch"] = model.generate(**batch, max_new_tokens=60, do_sample=True)
    results["warped batch"] = model.generate(
        **batch, max_new_tokens=40, do_sample=True, top_p=0.9, repetition_penalty=1.2
    )
    stops = {"stop_strings": ["the", "."], "tokenizer": tokenizer}
    results["stop"] = model.generate(**single, max_new_tokens=80, **stops)
    results["stop, batch"] = model.generate(**batch, max_new_tokens=80, **stops)
    full = model.generate(
        **single,
        max_new_tokens=30,
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    results |= {"sequences": full.sequences, "scores": full.scores, "logits": full.logits}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {**single, "streamer": streamer, "max_new_tokens": 40}
    thread = threading.Thread(target=model.generate, kwargs=options)
    thread.start()
    results["stream"] = list(streamer)
    thread.join()
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    results["pipeline"] = writer(TEXTS, max_new_tokens=30, batch_size=4, do_sample=False)
    results["pipeline, sampled"] = writer(TEXTS[1], max_new_tokens=30, do_sample=True)
    results["pipeline, chat"] = writer(
        [{"role": "user", "content": "Tell me a story."}], max_new_tokens=30
    )
    results["random state"] = torch.rand(3)
    return results


@pytest.mark.slow
def test_the_same_script_with_and_without(model, tokenizer, batch, single):
    expected = stock_script(model, tokenizer, batch, single)
    with enable(model) as enabled, warnings.catch_warnings():
        warnings.simplefilter("error", PlainDecodingWarning)
        found = stock_script(model, tokenizer, batch, single)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert same(value, found[name]), name
    assert enabled.stats.accepted > 300
    assert enabled.matrix.nbytes > 0


def test_a_wrong_acceptor_turns_it_red(model, batch, monkeypatch):
    from token_recycling.decoding import accept

    expected = model.generate(**batch, max_new_tokens=60)
    right, changed = accept.host_walk, []

    def one_more(*args):
        """Emit the choice after the next node, which was not accepted."""
        right(*args)
        choices, path, emitted, counts = args[-4:]
        for row, count in enumerate((emitted != NO_TOKEN).sum(axis=1)):
            if 0 < count < emitted.shape[1]:
                node = min(int(path[row, count - 1]) + 1, choices.shape[1] - 1)
                path[row, count], emitted[row, count] = node, choices[row, node]
                counts[1, row] += 1
                changed.append(row)

    with enable(model):
        assert same(model.generate(**batch, max_new_tokens=60), expected)
        monkeypatch.setattr(accept, "host_walk", one_more)
        assert not same(model.generate(**batch, max_new_tokens=60), expected)
    assert changed


def test_a_wrong_block_of_random_numbers_turns_it_red(model, batch, monkeypatch):
    from token_recycling.decoding.samplers import BatchSampler

    torch.manual_seed(0)
    expected = model.generate(**batch, max_new_tokens=30, do_sample=True)
    right = BatchSampler.__call__
    rows = len(batch["input_ids"])
    monkeypatch.setattr(
        BatchSampler, "__call__", lambda self, row, scores: right(self, (row + 1) % rows, scores)
    )
    torch.manual_seed(0)
    with enable(model):
        assert not same(model.generate(**batch, max_new_tokens=30, do_sample=True), expected)


class TestCustomGenerate:
    def test_with_a_streamer_and_stop_strings(self, model, tokenizer, single):
        """Transformers drops both for a callable; ours gets them."""
        options = {"max_new_tokens": 60, "stop_strings": ["."], "tokenizer": tokenizer}
        streamers = [TextIteratorStreamer(tokenizer, timeout=60) for _ in range(2)]
        expected = model.generate(**single, **options, streamer=streamers[0])
        recycler = TokenRecycling(model, tokenizer)
        found = model.generate(**single, **options, streamer=streamers[1], custom_generate=recycler)
        assert same(expected, found)
        assert list(streamers[0]) == list(streamers[1])
        assert recycler.stats.accepted > 0

    def test_another_model_object_is_refused(self, model, single):
        recycler = TokenRecycling(make("llama"))
        with pytest.raises(TokenRecyclingError, match="another model"):
            model.generate(**single, custom_generate=recycler)

    def test_other_callables_get_what_they_got_before(self, model, single):
        TokenRecycling(model)
        seen = {}

        def mine(model, input_ids, logits_processor, stopping_criteria, generation_config,
                 extra=None, **others):  # fmt: skip
            seen.update(others, extra=extra)
            return input_ids

        model.generate(**single, custom_generate=mine, extra=3)
        assert seen["extra"] == 3
        assert "streamer" not in seen
        assert "own_cache" not in seen

    def test_what_it_cannot_serve_goes_on_with_a_warning(self, model, single):
        recycler = TokenRecycling(model)
        expected = model.generate(**single, max_new_tokens=10, num_beams=3)
        with pytest.warns(PlainDecodingWarning, match="beam search"):
            found = model.generate(
                **single, max_new_tokens=10, num_beams=3, custom_generate=recycler
            )
        assert same(expected, found)
        with pytest.raises(TokenRecyclingError, match="Hub"):
            model.generate(**single, penalty_alpha=0.5, top_k=4, custom_generate=recycler)


class Slow(BaseStreamer):
    """Notes how many forwards had been run at each token."""

    def __init__(self, target, monkeypatch):
        self.forwards, self.at, self.ended = 0, [], 0
        for name in "prefill", "verify":
            monkeypatch.setattr(target, name, self.counted(getattr(target, name)))

    def counted(self, step):
        def run(*args, **options):
            self.forwards += 1
            return step(*args, **options)

        return run

    def put(self, value):
        self.at.append(self.forwards)
        assert value.device.type == "cpu"

    def end(self):
        self.ended += 1


class TestStreamers:
    def test_tokens_come_while_decoding_runs(self, model, single, monkeypatch):
        with enable(model) as enabled:
            streamer = Slow(enabled.recycler.target, monkeypatch)
            model.generate(**single, max_new_tokens=50, streamer=streamer)
        prompt, *tokens = streamer.at
        assert prompt == 0
        assert len(tokens) == 50
        steps = enabled.stats.steps + 1
        assert sorted(set(tokens)) == list(range(1, steps + 1))  # after each forward its tokens
        assert streamer.ended == 1

    def test_batches_are_streamed_in_step(self, model, batch):
        class Columns(BaseStreamer):
            def __init__(self):
                self.columns = []

            def put(self, value):
                self.columns.append(value)

            def end(self):
                pass

        streamers = Columns(), Columns()
        model.generate(**batch, max_new_tokens=40, streamer=streamers[0])
        with enable(model):
            model.generate(**batch, max_new_tokens=40, streamer=streamers[1])
        assert same(streamers[0].columns, streamers[1].columns)

    def test_a_reader_that_stops_reading(self, model, tokenizer, single):
        streamer = TextIteratorStreamer(tokenizer, timeout=30)
        with enable(model):
            thread = threading.Thread(
                target=model.generate,
                kwargs={**single, "streamer": streamer, "max_new_tokens": 100},
            )
            thread.start()
            next(iter(streamer))
            thread.join(60)
            assert not thread.is_alive()
            again = model.generate(**single, max_new_tokens=20)
        assert same(again, model.generate(**single, max_new_tokens=20))

    @pytest.mark.parametrize("after", [0, 1, 5])
    def test_a_model_that_raises_ends_the_stream(self, model, tokenizer, single, after):
        streamer = TextIteratorStreamer(tokenizer, timeout=30)
        caught = []
        calls = []

        def fail(*_):
            calls.append(1)
            if len(calls) > after:
                raise RuntimeError("out of memory")

        def target():
            try:
                model.generate(**single, streamer=streamer, max_new_tokens=100)
            except RuntimeError as error:
                caught.append(str(error))

        with enable(model):
            hook = model.register_forward_pre_hook(fail)
            thread = threading.Thread(target=target)
            thread.start()
            list(streamer)  # hangs where nobody ends it
            thread.join(60)
            hook.remove()
            assert caught == ["out of memory"]
            again = model.generate(**single, max_new_tokens=20)  # and the next call is right
        assert same(again, model.generate(**single, max_new_tokens=20))

    def test_wrong_options_end_the_stream_too(self, model, tokenizer, single):
        streamer = TextIteratorStreamer(tokenizer, timeout=30)
        with enable(model), pytest.raises(ValueError, match="no_such_option"):
            model.generate(**single, streamer=streamer, no_such_option=1)
        assert "".join(streamer) == ""

    def test_a_streamer_that_raises(self, model, single):
        class Gone(BaseStreamer):
            ended = 0

            def put(self, value):
                if value.ndim == 1:
                    raise ConnectionError("the reader has gone")

            def end(self):
                self.ended += 1

        streamer = Gone()
        with enable(model):
            with pytest.raises(ConnectionError):
                model.generate(**single, streamer=streamer, max_new_tokens=20)
            assert streamer.ended == 1
            again = model.generate(**single, max_new_tokens=20)
        assert same(again, model.generate(**single, max_new_tokens=20))

    def test_text_streamer_refuses_batches_as_ever(self, model, tokenizer, batch):
        with enable(model), pytest.raises(ValueError, match="batch size 1"):
            model.generate(**batch, streamer=TextStreamer(tokenizer), max_new_tokens=5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
class TestCaches:
    def talk(self, model, cache, turns=3):
        """A conversation of three turns; the ids after each."""
        ids, said = torch.tensor(random_prompts([25])), []
        for turn in range(turns):
            result = model.generate(
                ids, past_key_values=cache, max_new_tokens=20, return_dict_in_generate=True
            )
            cache = result.past_key_values
            said.append(result.sequences)
            ids = torch.cat([result.sequences, torch.tensor(random_prompts([6], turn))], dim=1)
        return said, cache

    def test_a_conversation_is_read_once(self, name):
        model = make(name)
        expected, _ = self.talk(model, None)
        with enable(model, strict=True) as enabled:
            found, cache = self.talk(model, None)
        assert same(expected, found)
        # what the first turn reads, and per turn the last token of the answer and six new ones
        assert enabled.stats.prompt_tokens == 25 + 2 * 7
        assert cache.get_seq_length() == found[-1].shape[1] - 1

    def test_the_users_own_cache_is_filled(self, name):
        model = make(name)
        expected, theirs = self.talk(model, DynamicCache())
        mine = DynamicCache(config=model.config)
        with enable(model, strict=True):
            found, returned = self.talk(model, mine)
        assert returned is mine
        assert same(expected, found)
        for a, b in zip(theirs.layers, mine.layers, strict=True):
            assert same(a.keys, b.keys)
            assert same(a.values, b.values)

    def test_stock_generate_goes_on_from_it(self, name):
        model = make(name)
        ids = torch.tensor(random_prompts([25]))
        with enable(model):
            first = model.generate(ids, max_new_tokens=20, return_dict_in_generate=True)
        more = torch.cat([first.sequences, torch.tensor(random_prompts([6]))], dim=1)
        found = model.generate(more, past_key_values=first.past_key_values, max_new_tokens=20)
        assert same(found, model.generate(more, max_new_tokens=20))

    def test_only_the_new_tokens_are_given(self, name):
        """The mask then covers the cached ones too."""
        model = make(name)

        def two_turns():
            cache = DynamicCache()
            model.generate(torch.tensor(random_prompts([25])), past_key_values=cache,
                           max_new_tokens=10)  # fmt: skip
            new = torch.tensor(random_prompts([6]))
            mask = torch.ones(1, cache.get_seq_length() + 6, dtype=torch.long)
            return model.generate(
                new, attention_mask=mask, past_key_values=cache, max_new_tokens=20
            )

        try:
            expected = two_turns()
        except IndexError:
            pytest.skip("stock generate cannot do this before Transformers 5.4")
        with enable(model, strict=True):
            assert same(two_turns(), expected)

    def test_a_batch_returns_the_cache_of_a_padded_batch(self, name):
        model = make(name)
        prompts = random_prompts([9, 4, 6])
        ids = torch.tensor([[0] * (9 - len(p)) + p for p in prompts])
        options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 30}
        free = model.generate(ids, **options)
        options |= {"eos_token_id": [int(free[0, 9 + 2]), int(free[1, 9 + 7])], "pad_token_id": 0}
        theirs, mine = DynamicCache(), DynamicCache()
        expected = model.generate(ids, past_key_values=theirs, **options)
        with enable(model, strict=True):
            found = model.generate(ids, past_key_values=mine, **options)
        assert same(expected, found)
        assert (expected == 0).sum() > (ids == 0).sum()
        seen = torch.cat([ids > 0, torch.ones(3, expected.shape[1] - 10).bool()], dim=1)
        for a, b in zip(theirs.layers, mine.layers, strict=True):
            keep = seen[:, None, :, None].expand_as(a.keys)
            assert same(a.keys[keep], b.keys[keep])


class TestRefusals:
    @pytest.mark.parametrize(
        "reason, options",
        [
            ("beam search", {"num_beams": 2}),
            ("assisted generation", {"prompt_lookup_num_tokens": 3}),
            ("use_cache is off", {"use_cache": False}),
            (
                "hidden states",
                {"output_hidden_states": True, "return_dict_in_generate": True},
            ),
        ],
    )
    def test_by_name_and_once(self, model, single, reason, options):
        expected = model.generate(**single, max_new_tokens=10, **options)
        with enable(model):
            with pytest.warns(PlainDecodingWarning, match=reason):
                model.generate(**single, max_new_tokens=10, **options)
            with warnings.catch_warnings():
                warnings.simplefilter("error", PlainDecodingWarning)
                found = model.generate(**single, max_new_tokens=10, **options)
        sequences = [getattr(r, "sequences", r) for r in (expected, found)]
        assert same(*sequences)

    def test_embeddings(self, model, single):
        embeds = model.get_input_embeddings()(single.input_ids)
        expected = model.generate(inputs_embeds=embeds, max_new_tokens=10)
        with enable(model), pytest.warns(PlainDecodingWarning, match="embeddings"):
            assert same(model.generate(inputs_embeds=embeds, max_new_tokens=10), expected)

    def test_a_static_cache_of_the_users(self, model, single):
        def run():
            cache = StaticCache(config=model.config, max_cache_len=64)
            return model.generate(**single, past_key_values=cache, max_new_tokens=10)

        expected = run()
        with enable(model), pytest.warns(PlainDecodingWarning, match="StaticCache"):
            assert same(run(), expected)

    def test_padding_on_the_right(self, model):
        inputs = {
            "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]),
            "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        }
        expected = model.generate(**inputs, max_new_tokens=10)
        with enable(model), pytest.warns(PlainDecodingWarning, match="padding"):
            assert same(model.generate(**inputs, max_new_tokens=10), expected)

    def test_a_criterion_of_ones_own_is_asked_as_often(self, model, single, batch):
        class Length(StoppingCriteria):
            calls = 0

            def __call__(self, ids, scores, **_):
                self.calls += 1
                return torch.tensor([len(row) > 30 for row in ids])

        def run(inputs):
            criterion = Length()
            out = model.generate(
                **inputs, max_new_tokens=40, stopping_criteria=StoppingCriteriaList([criterion])
            )
            return out, criterion.calls

        expected = run(single), run(batch)
        with enable(model) as enabled:
            assert same(run(single), expected[0])
            assert enabled.stats.new_tokens > 0
            enabled.stats.new_tokens = 0
            assert same(run(batch), expected[1])
            assert enabled.stats.new_tokens > 0

    def test_beyond_learned_positions(self):
        model = make("gpt2", n_positions=64)
        ids = torch.tensor([[5, 6]])
        expected = model.generate(ids, max_new_tokens=62)
        with enable(model):
            with warnings.catch_warnings():
                warnings.simplefilter("error", PlainDecodingWarning)
                assert same(model.generate(ids, max_new_tokens=62), expected)
            with (
                pytest.warns(PlainDecodingWarning, match="64 positions"),
                pytest.raises(IndexError),  # as stock generate does
            ):
                model.generate(ids, max_new_tokens=90)

    def test_beyond_the_context_of_rotary_positions(self):
        """Stock generate goes on there, so do we."""
        model = make("llama", max_position_embeddings=40)
        ids = torch.tensor(random_prompts([20]))
        expected = model.generate(ids, max_new_tokens=60)
        with enable(model, strict=True):
            assert same(model.generate(ids, max_new_tokens=60), expected)

    def test_a_model_without_tree_attention_warns_once_at_enable(self):
        model = make("mpt")
        ids = torch.tensor(random_prompts([20]))
        expected = model.generate(ids, max_new_tokens=10)
        with pytest.warns(PlainDecodingWarning) as caught, enable(model):
            assert same(model.generate(ids, max_new_tokens=10), expected)
        assert len([w for w in caught if w.category is PlainDecodingWarning]) == 1
        with pytest.raises(TokenRecyclingError, match="tree attention"):
            enable(model, strict=True)

    def test_models_with_an_encoder_are_refused(self):
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
        with pytest.raises(TokenRecyclingError, match="encoder"):
            enable(T5ForConditionalGeneration(config))


class TestEnable:
    def test_nests_and_ends(self, model, single):
        outer = enable(model)
        with enable(model, nodes=4) as inner:
            model.generate(**single, max_new_tokens=20)
            assert inner.stats.new_tokens == 20
            assert outer.stats.new_tokens == 0
        model.generate(**single, max_new_tokens=20)
        assert outer.stats.new_tokens == 20
        outer.disable()
        outer.disable()

    def test_copies_and_pickles_of_the_model_are_stock(self, single):
        model = make("llama")
        with enable(model) as enabled:
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert same(
                    other.generate(torch.tensor([[5, 6]]), max_new_tokens=10),
                    model.generate(torch.tensor([[5, 6]]), max_new_tokens=10),
                )
                before = enabled.stats.new_tokens
                other.generate(torch.tensor([[5, 6]]), max_new_tokens=10)
                assert enabled.stats.new_tokens == before

    def test_the_matrix_is_kept_from_call_to_call(self, model, single):
        with enable(model) as enabled:
            model.generate(**single, max_new_tokens=50)
            cold = enabled.stats.steps
            model.generate(**single, max_new_tokens=50)
            assert enabled.stats.steps - cold < cold

    def test_two_threads_at_once(self, model, tokenizer):
        inputs = [tokenizer(text, return_tensors="pt") for text in TEXTS * 2]
        expected = [model.generate(**x, max_new_tokens=40) for x in inputs]
        found = [None] * len(inputs)

        def run(index):
            found[index] = model.generate(**inputs[index], max_new_tokens=40)

        with enable(model), warnings.catch_warnings():
            warnings.simplefilter("ignore", PlainDecodingWarning)
            threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert same(found, expected)

    def test_a_generate_of_the_objects_own_is_not_covered(self):
        model = make("llama")
        model.generate = lambda *args, **kwargs: "mine"
        with pytest.raises(TokenRecyclingError, match="its own"):
            enable(model)

    def test_comparing_an_enabled_model_still_compares_with_stock(self, model, tokenizer):
        from token_recycling.bench.compare import plain_generate

        with enable(model) as enabled:
            plain_generate(enabled.recycler, [5, 6, 7], {"max_new_tokens": 10})
            assert enabled.stats.new_tokens == 0


class TestUpstreamComplaints:
    """What users report about assisted generation; the stock column shows whether it still is."""

    WAYS = ["ours", pytest.param("stock", marks=pytest.mark.xfail(strict=False))]

    def run(self, way, model, inputs, **options):
        if way == "stock":
            return model.generate(**inputs, prompt_lookup_num_tokens=10, **options)
        with enable(model, strict=True):
            return model.generate(**inputs, **options)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_stop_string_inside_an_accepted_block(self, model, tokenizer, way):
        """huggingface/transformers #48039."""
        cases = {
            "A baker sells 24 rolls in the morning. ": ("124", "24", "baker"),
            "The fox ran. The fox ran. ": ("fox", "ran"),
            "Tom has 12 marbles. He buys 3 bags. ": ("12", "12*12"),
        }
        for text, stops in cases.items():
            inputs = tokenizer(text * 2, return_tensors="pt")
            for stop in stops:
                options = {"max_new_tokens": 80, "stop_strings": [stop], "tokenizer": tokenizer}
                expected = model.generate(**inputs, **options)
                assert same(self.run(way, model, inputs, **options), expected)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_batch(self, model, batch, way):
        """huggingface/transformers #29769, #32165."""
        expected = model.generate(**batch, max_new_tokens=40)
        assert same(self.run(way, model, batch, max_new_tokens=40), expected)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_static_cache(self, model, single, way):
        """huggingface/transformers #32946."""
        expected = model.generate(**single, max_new_tokens=40)
        options = {"max_new_tokens": 40, "cache_implementation": "static"}
        assert same(self.run(way, model, single, **options), expected)

"""Corners of `generate` that an adversary found: each was once wrong, or raised, or hung."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
import weakref

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from architectures import make
from letters import letters
from models import random_prompts
from token_recycling import (
    PlainDecodingWarning,
    TokenRecycling,
    TokenRecyclingError,
    enable,
)
from token_recycling.model.fallback import PlainTarget

IDS = torch.tensor(random_prompts([12]))


def stock(model, ids=IDS, **options):
    return type(model).generate(model, ids, **options)


@pytest.fixture
def model():
    model = make("llama")
    model.generation_config.pad_token_id = 0
    return model


class TestTheModelIsAnotherOne:
    def test_flex_attention_is_refused_before_the_probe(self, model):
        """With a dense mask it ends the process."""
        model.config._attn_implementation = "flex_attention"
        with pytest.warns(PlainDecodingWarning, match="choose sdpa or eager"):
            assert isinstance(TokenRecycling(model).target, PlainTarget)

    def test_or_afterwards(self, model):
        with enable(model, strict=True) as enabled:
            model.config._attn_implementation = "flex_attention"
            with pytest.raises(TokenRecyclingError, match="choose sdpa or eager"):
                enabled.recycler.generate([5, 6], max_new_tokens=3)

    def test_inputs_prepared_otherwise_are_found_by_the_probe(self):
        from transformers import LlamaForCausalLM

        class Shifted(LlamaForCausalLM):
            def prepare_inputs_for_generation(self, input_ids, *args, **kwargs):
                return super().prepare_inputs_for_generation(input_ids + 1, *args, **kwargs)

        model = make("llama")
        model.__class__ = Shifted
        with pytest.raises(TokenRecyclingError, match="differ"):
            enable(model, strict=True)

    def test_a_soft_prompt_goes_to_the_stock_path(self, model):
        """As peft does it: a method of the object, for the time of the call."""
        own = type(model).prepare_inputs_for_generation.__get__(model)
        with enable(model):
            model.prepare_inputs_for_generation = lambda ids, **kw: own((ids + 1) % 96, **kw)
            with pytest.warns(PlainDecodingWarning, match="prepare_inputs_for_generation"):
                found = model.generate(IDS, max_new_tokens=20)
        assert torch.equal(found, stock(model, max_new_tokens=20))

    def test_training_mode(self):
        model = make("llama", attention_dropout=0.3)
        with enable(model):
            model.train()
            torch.manual_seed(0)
            with pytest.warns(PlainDecodingWarning, match="training mode"):
                found = model.generate(IDS, max_new_tokens=20)
        torch.manual_seed(0)
        assert torch.equal(found, stock(model, max_new_tokens=20))

    def test_enabled_while_training_and_used_after(self):
        model = make("llama", attention_dropout=0.3).train()
        with enable(model, strict=True):
            assert model.training
            model.eval()
            assert torch.equal(
                model.generate(IDS, max_new_tokens=20), stock(model, max_new_tokens=20)
            )

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
    def test_another_precision_after_enable(self, name):
        model = make(name)
        with enable(model):
            model.double()
            found = model.generate(IDS, max_new_tokens=40)
        assert torch.equal(found, stock(model, max_new_tokens=40))

    def test_another_vocabulary_after_enable(self, model):
        with enable(model):
            model.resize_token_embeddings(120)
            with pytest.warns(PlainDecodingWarning, match="vocabulary"):
                found = model.generate(IDS, max_new_tokens=20)
        assert torch.equal(found, stock(model, max_new_tokens=20))

    def test_float32_logits_follow_the_weights(self, model):
        model.to(torch.bfloat16)
        with enable(model, float32_logits=True) as enabled:
            model.generate(IDS, max_new_tokens=5)
            with torch.no_grad():
                model.lm_head.weight.copy_(torch.randn_like(model.lm_head.weight))
            found = model.generate(IDS, max_new_tokens=20)
            with enabled.recycler.target.lm_head:
                expected = stock(model, max_new_tokens=20)
        assert found[0, :16].tolist() == expected[0, :16].tolist()

    def test_something_that_is_no_model(self):
        with pytest.raises(TokenRecyclingError, match="not a Transformers model"):
            enable(torch.nn.Linear(2, 2))


class TestCopies:
    def test_a_copy_can_be_enabled(self, model):
        options = {"stop_strings": ["n"], "tokenizer": letters(), "max_new_tokens": 30}
        with enable(model):
            copies = [copy.deepcopy(model)]
        copies.append(copy.deepcopy(model))  # of one that was enabled once
        for other in copies:
            streamers = [Puts(), Puts()]
            expected = stock(other, streamer=streamers[0], **options)
            with enable(other, strict=True) as enabled:
                found = other.generate(IDS, streamer=streamers[1], **options)
                assert enabled.stats.new_tokens > 0
            assert torch.equal(found, expected)
            assert streamers[0].seen == streamers[1].seen
            cache = DynamicCache()
            with enable(other):
                other.generate(IDS, max_new_tokens=5, past_key_values=cache)
            assert cache.get_seq_length() == 12 + 4

    def test_disable_in_any_order(self, model):
        first, second = enable(model), enable(model)
        first.disable()
        model.generate(IDS, max_new_tokens=5)
        assert second.stats.new_tokens == 5
        second.disable()
        assert "generate" not in model.__dict__

    def test_the_models_memory_is_freed_at_once(self, model):
        alive = weakref.ref(make("llama"))
        assert alive() is None
        other = make("llama")
        alive = weakref.ref(other)
        gc.collect()
        gc.disable()
        try:
            enabled = enable(other)
            other.generate(IDS, max_new_tokens=5)
            enabled.disable()
            del enabled, other
            assert alive() is None
        finally:
            gc.enable()


class Puts(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


class TestOtherPeoplesCode:
    def test_scores_can_be_written_to_and_differentiated(self, model):
        with enable(model, strict=True):
            out = model.generate(
                IDS,
                max_new_tokens=5,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
            )
        out.scores[0].add_(1)
        weight = torch.ones(96, requires_grad=True)
        (out.logits[0] * weight).sum().backward()
        assert weight.grad is not None

    def test_a_processor_that_needs_gradients(self, model):
        class Steered(LogitsProcessor):
            def __call__(self, input_ids, scores):
                with torch.enable_grad():
                    shift = torch.zeros_like(scores, requires_grad=True)
                    ((scores + shift) ** 2).sum().backward()
                return scores - 0.1 * shift.grad

        def run(generate):
            return generate(
                IDS, max_new_tokens=20, logits_processor=LogitsProcessorList([Steered()])
            )

        with enable(model, strict=True):
            found = run(model.generate)
        assert torch.equal(found, run(lambda ids, **kw: stock(model, ids, **kw)))

    def test_a_criterion_that_reads_what_was_streamed(self, model):
        """A cancel button: asked after a token, it sees what was streamed before that token."""

        class Cancel(StoppingCriteria):
            def __init__(self, streamer, limit):
                self.streamer, self.limit = streamer, limit

            def __call__(self, input_ids, scores, **_):
                return torch.tensor([len(self.streamer.seen) >= self.limit])

        def lengths(generate):
            found = []
            for limit in range(2, 20):
                streamer = Puts()
                criteria = StoppingCriteriaList([Cancel(streamer, limit)])
                out = generate(
                    IDS, max_new_tokens=30, streamer=streamer, stopping_criteria=criteria
                )
                found.append(out.shape[1])
            return found

        expected = lengths(lambda ids, **kw: stock(model, ids, **kw))
        if expected[0] == 12 + 1:
            pytest.skip("older versions stream a token before they ask the criteria")
        with enable(model, strict=True):
            assert lengths(model.generate) == expected
        assert len(set(expected)) == 18


class TestInputs:
    @pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bool, torch.int32])
    def test_masks_of_other_types(self, model, kind):
        ids = torch.tensor([[0, 0, 7, 8], [3, 4, 5, 6]])
        mask = (ids > 0).to(kind)
        try:
            expected = stock(model, ids, attention_mask=mask, max_new_tokens=20)
        except (RuntimeError, TypeError):
            pytest.skip("stock generate does not take it either")
        with enable(model, strict=True):
            found = model.generate(ids, attention_mask=mask, max_new_tokens=20)
        assert torch.equal(found, expected)

    def test_short_integers(self, model):
        expected = stock(model, IDS.int(), max_new_tokens=10)
        with enable(model, strict=True):
            found = model.generate(IDS.int(), max_new_tokens=10)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)

    def test_a_prompt_that_fills_the_table_of_positions(self):
        model = make("gpt2", n_positions=64)
        ids = torch.tensor(random_prompts([64]))
        with enable(model, strict=True):
            found = model.generate(ids, max_new_tokens=1)
        assert torch.equal(found, stock(model, ids, max_new_tokens=1))

    def test_a_criterion_that_goes_beyond_the_table(self):
        model = make("gpt2", n_positions=64)
        criteria = StoppingCriteriaList([MaxLengthCriteria(90)])
        with (
            enable(model),
            pytest.warns(PlainDecodingWarning, match="64 positions"),
            pytest.raises(IndexError),
        ):
            model.generate(IDS, stopping_criteria=criteria)

    def test_another_default_device(self, model):
        expected = stock(model, max_new_tokens=20)
        with enable(model, strict=True), torch.device("meta"):
            found = model.generate(IDS, max_new_tokens=20)
        assert torch.equal(found, expected)

    def test_a_cache_of_another_precision(self, model):
        def two_turns(generate):
            cache = DynamicCache()
            for index, layer in enumerate(model(IDS).past_key_values.layers):
                cache.update(layer.keys.bfloat16(), layer.values.bfloat16(), index)
            ids = torch.cat([IDS, IDS], dim=1)
            return generate(ids, past_key_values=cache, max_new_tokens=20)

        expected = two_turns(lambda ids, **kw: stock(model, ids, **kw))
        with enable(model, strict=True):
            assert torch.equal(two_turns(model.generate), expected)

    def test_time_ends_all_rows_of_a_batch_at_once(self, model):
        ids = torch.tensor(random_prompts([5, 5]))
        with enable(model, strict=True):
            found = model.generate(ids, max_time=100.0, max_new_tokens=5)
            assert torch.equal(found, stock(model, ids, max_new_tokens=5))
            found = model.generate(ids, max_time=1e-9, max_new_tokens=5)
        assert torch.equal(found, stock(model, ids, max_new_tokens=1))

    def test_hub_methods_are_stocks_for_a_plain_target_too(self):
        model = make("mpt")
        with pytest.warns(PlainDecodingWarning):
            enabled = enable(model)
        options = {"penalty_alpha": 0.6, "top_k": 4}
        with pytest.raises(Exception, match=r"hub|trust_remote_code|contrastive") as theirs:
            stock(model, **options)
        with enabled, pytest.raises(theirs.type) as ours:
            model.generate(IDS, **options)
        assert str(ours.value) == str(theirs.value)

    def test_a_vision_model_with_text_alone(self):
        from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

        text = make("llama").config
        vision = CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            image_size=8, patch_size=4,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(
            LlavaConfig(vision_config=vision, text_config=text, image_token_index=95)
        ).eval()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.4)
        model.generation_config.eos_token_id = None
        expected = stock(model, max_new_tokens=30)
        with enable(model, strict=True) as enabled:
            found = model.generate(IDS, max_new_tokens=30)
        assert torch.equal(found, expected)
        assert enabled.stats.new_tokens == 30


class TestOneTarget:
    def test_two_threads_never_get_a_wrong_text(self, model):
        expected = stock(model, max_new_tokens=40)[0, 12:].tolist()
        results = []

        def by_generate():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(model.generate(IDS, max_new_tokens=40)[0, 12:].tolist())

        def by_recycler(recycler):
            try:
                results.append(recycler.generate(IDS[0].tolist(), max_new_tokens=40).token_ids)
            except TokenRecyclingError:
                results.append(None)

        def patient():
            try:
                by_generate()
            except TokenRecyclingError:  # the recycler's own answer has come in between
                results.append(None)

        with enable(model) as enabled:
            for _ in range(20):
                threads = [
                    threading.Thread(target=patient),
                    threading.Thread(target=by_recycler, args=(enabled.recycler,)),
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        assert len(results) == 40
        assert expected in results
        assert all(result in (None, expected) for result in results)

    def test_keep_context_after_a_continued_cache(self, model):
        recycler = TokenRecycling(model, strict=True)
        cache = model(IDS).past_key_values
        new = torch.tensor(random_prompts([3], seed=5))
        mask = torch.ones(1, 15, dtype=torch.long)
        try:
            model.generate(
                new, attention_mask=mask, past_key_values=cache, custom_generate=recycler
            )
        except IndexError:
            pytest.skip("generate cannot do this before Transformers 5.4")
        prompt = [0] * 12 + new[0].tolist()
        kept = recycler.generate(prompt, max_new_tokens=20, keep_context=True)
        options = {"attention_mask": mask, "max_new_tokens": 20}
        expected = stock(model, torch.tensor([prompt]), **options)
        assert kept.token_ids == expected[0, 15:].tolist()

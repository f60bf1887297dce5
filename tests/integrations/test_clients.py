"""Real clients: lm_eval's batches, peft's adapters. ``make test-clients`` installs them."""

from __future__ import annotations

import copy

import pytest
import torch

from architectures import make
from models import plain, random_prompts
from token_recycling import PlainDecodingWarning, TokenRecycling, enable

pytestmark = pytest.mark.clients
[PROMPT] = random_prompts([24])


class TestLmEval:
    @pytest.fixture
    def lm(self, bundled):
        huggingface = pytest.importorskip("lm_eval.models.huggingface")
        return huggingface.HFLM(
            pretrained=bundled.model, tokenizer=bundled.tokenizer, batch_size=4, device="cpu"
        )

    def requests(self):
        from lm_eval.api.instance import Instance

        texts = [
            "Once upon a time there was a king", "Tom has 12 marbles. He buys", "The fox",
            "Anna reads 15 pages a day.", "A train has 6 wagons", "Go on with this story:",
            "Write a Python function", "The children went", "The old", "A baker sells 24 rolls",
        ]  # fmt: skip
        options = {"until": ["\n\n", ".", " king"], "max_gen_toks": 48}
        return [
            Instance("generate_until", {}, (text, copy.deepcopy(options)), i)
            for i, text in enumerate(texts)
        ]

    def test_batches_of_four_recycle_and_are_identical(self, lm, recwarn):
        expected = lm.generate_until(self.requests(), disable_tqdm=True)
        recwarn.clear()
        with enable(lm, strict=True) as enabled:
            found = lm.generate_until(self.requests(), disable_tqdm=True)
            again = lm.generate_until(self.requests(), disable_tqdm=True)
            assert enabled.stats.new_tokens > 0
            assert enabled.stats.mat > 1.2
            print(f"MAT {enabled.stats.mat:.2f} in batches of 4")
        assert not [w for w in recwarn if w.category is PlainDecodingWarning]
        assert found == again == expected
        assert len(set(found)) > 3


class TestPeft:
    @pytest.fixture
    def adapted(self):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "k_proj", "v_proj", "lm_head"], lora_alpha=16,
            init_lora_weights=False,
        )  # fmt: skip
        return peft.get_peft_model(make("llama"), config).eval()

    def test_a_peft_model_is_enabled(self, adapted):
        ids = torch.tensor([PROMPT])
        expected = adapted.generate(input_ids=ids, max_new_tokens=30, pad_token_id=0)
        with enable(adapted, strict=True) as enabled:
            found = adapted.generate(input_ids=ids, max_new_tokens=30, pad_token_id=0)
            assert enabled.stats.new_tokens == 30
        assert torch.equal(found, expected)

    def test_adapters_that_are_switched_and_merged_between_turns(self, adapted):
        recycler = TokenRecycling(adapted, nodes=8)
        model = recycler.model
        read = list(PROMPT)
        texts = set()

        def turn():
            nonlocal read
            prompt = [*read, 7, 8]
            answer = recycler.generate(prompt, max_new_tokens=20, keep_context=True)
            assert answer.token_ids == plain(model, prompt, 20)
            texts.add(tuple(answer.token_ids))
            read = prompt + answer.token_ids
            return answer.stats.prompt_tokens < len(prompt)

        turn()
        assert turn()  # kept
        with adapted.disable_adapter():
            assert not turn()  # read anew
            assert turn()
        assert not turn()
        adapted.merge_adapter()
        turn()
        adapted.unmerge_adapter()
        turn()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data *= -3
        assert not turn()
        assert len(texts) > 3

    def test_float32_logits_with_an_adapter_merged_into_the_projection(self):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        model = make("llama").bfloat16()
        recycler = TokenRecycling(model, nodes=8, float32_logits=True)
        before = recycler.generate(PROMPT, max_new_tokens=16).token_ids
        adapted = peft.get_peft_model(model, config)
        adapted.merge_adapter()
        merged = recycler.generate(PROMPT, max_new_tokens=16).token_ids
        fresh = make("llama").bfloat16()
        fresh.lm_head.weight.data.copy_(model.lm_head.base_layer.weight.data)
        expected = TokenRecycling(fresh, nodes=8, float32_logits=True)
        assert merged == expected.generate(PROMPT, max_new_tokens=16).token_ids != before
        adapted.unmerge_adapter()
        assert recycler.target.lm_head.weight is not None

    def test_float32_logits_with_an_adapter_beside_the_projection(self):
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
        model = make("llama")
        recycler = TokenRecycling(model, nodes=8, float32_logits=True)
        before = recycler.generate(PROMPT, max_new_tokens=16).token_ids
        peft.get_peft_model(model, config)
        answer = recycler.generate(PROMPT, max_new_tokens=16)
        assert answer.token_ids == plain(model, PROMPT, 16) != before

    def test_a_graph_with_adapters_that_are_switched(self, adapted):
        recycler = TokenRecycling(adapted, nodes=8, graph=True)
        texts = []
        for _ in range(3):
            answer = recycler.generate(PROMPT, max_new_tokens=20)
            texts.append(answer.token_ids)
            assert answer.token_ids == plain(recycler.model, PROMPT, 20)
            switch = adapted.base_model
            (switch.disable_adapter_layers if len(texts) == 1 else switch.enable_adapter_layers)()
        assert texts[0] == texts[2] != texts[1]
        assert recycler.session._graph is not None

"""Float32 logits in half precision, and the report of near ties."""

import json

import pytest
import torch

from architectures import make
from command import call
from conformance import scale_products
from models import random_prompts
from token_recycling import TokenRecycling, TokenRecyclingError
from token_recycling.bench.check import Result, _Difference, check, overall
from token_recycling.model.kv_cache import RecyclingCache

PROMPTS = random_prompts([20, 7, 33])


def half(name="llama"):
    return make(name).to(torch.bfloat16)


class TestFloat32Logits:
    def test_logits_are_float32_and_only_inside(self):
        model = half()
        recycler = TokenRecycling(model, float32_logits=True, strict=True)
        ids = torch.tensor(PROMPTS[:1])
        outside = model(ids).logits
        with recycler.target.lm_head:
            inside = model(ids).logits
        assert outside.dtype == torch.bfloat16
        assert inside.dtype == torch.float32
        assert torch.equal(inside.bfloat16(), outside)
        assert model(ids).logits.dtype == torch.bfloat16
        assert recycler.target.prefill(PROMPTS[:1]).dtype == torch.float32

    def test_generate_is_that_of_the_same_head(self):
        """Plain decoding with the float32 projection says what is right."""
        recycler = TokenRecycling(half(), float32_logits=True, strict=True)
        results = list(check(recycler, PROMPTS, 60))
        assert overall(results) != "WRONG"
        assert recycler.stats.accepted > 0

    def test_a_batch_of_rounded_logits_ties_and_one_in_float32_does_not(self):
        model = half()
        ids = torch.tensor(random_prompts([200]))
        exact = TokenRecycling(model, float32_logits=True).target.lm_head

        def ties():
            best = model(ids).logits[0].float().topk(2).values
            return int((best[:, 0] == best[:, 1]).sum())

        rounded = ties()
        with exact:
            assert ties() == 0
        assert rounded > 0

    def test_a_projection_that_is_not_linear_is_refused(self):
        model = half()
        model.lm_head = torch.nn.Sequential(model.lm_head)
        with pytest.raises(TokenRecyclingError, match="plain linear LM head"):
            TokenRecycling(model, float32_logits=True)


class TestCheck:
    def test_float32_is_lossless(self):
        results = list(check(TokenRecycling(make("llama")), PROMPTS, 40))
        assert [r.verdict for r in results] == ["lossless"] * 3
        assert all(r.new_tokens == 40 and 0 < r.noise < 1e-3 for r in results)

    def test_a_wrong_commit_is_wrong(self, monkeypatch):
        def forgetful(self, path, counts):
            self.lengths = [n + more for n, more in zip(self.lengths, counts, strict=True)]

        recycler = TokenRecycling(make("llama"), nodes=80)
        monkeypatch.setattr(RecyclingCache, "commit", forgetful)
        results = list(check(recycler, PROMPTS, 40))
        assert overall(results) == "WRONG"
        wrong = next(r for r in results if r.verdict == "WRONG")
        assert wrong.difference.gap > 100 * wrong.noise

    def test_bfloat16_is_a_near_tie_at_worst(self):
        results = list(check(TokenRecycling(half()), random_prompts([20] * 12), 100))
        assert overall(results) == "near-tie"  # 1200 tokens of a random model: some do flip
        assert all(result.same_steps for result in results)
        for result in results:
            if result.difference is not None:
                assert result.difference.plain_token != result.difference.token

    def test_other_texts_than_those_of_our_own_steps(self, monkeypatch):
        """Where the kernel multiplies several tokens otherwise than one."""
        recycler = TokenRecycling(half(), nodes=7)
        scale_products(monkeypatch, 1.05)
        assert not all(result.same_steps for result in check(recycler, PROMPTS, 100))

    def test_verdicts(self):
        def result(gap):
            return Result(9, _Difference(1, 2, 3, gap, True), noise=0.1)

        same = Result(9, None, 0.1)
        assert [r.verdict for r in (same, result(0.4), result(0.5))] == [
            "lossless",
            "near-tie",
            "WRONG",
        ]
        assert overall([same, result(0.1)]) == "near-tie"
        assert overall([result(0.1), result(0.5), same]) == "WRONG"
        assert overall([same]) == "lossless"

    def test_an_answer_that_ends_early_is_wrong(self):
        recycler = TokenRecycling(make("llama"))
        generate = recycler.generate

        def shorter(ids, max_new_tokens):
            return generate(ids, max_new_tokens=max_new_tokens - 5)

        recycler.generate = shorter
        assert overall(check(recycler, PROMPTS, 20)) == "WRONG"


class TestCommandLine:
    def test_lossless(self, capsys, tmp_path):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("How many legs have 3 cats?\n\nTell me a story.\n")
        code, out, _ = call("check", "--prompts", prompts, "-n", 20)
        assert code == 0
        assert "2 of 2 answers identical (float32, MAT" in out
        assert "lossless\n2 of 2 those of our own steps without drafts (batch-invariant)" in out

    def test_json(self, capsys, tmp_path):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("How many legs have 3 cats?\n")
        code, out, _ = call("check", "--prompts", prompts, "-n", 20, "--json")
        assert code == 0
        report = json.loads(out)
        assert report["verdict"] == report["results"][0]["verdict"] == "lossless"

    def test_wrong_is_exit_code_1(self, capsys, monkeypatch):
        monkeypatch.setattr(Result, "verdict", "WRONG")
        assert call("check", "-n", 2)[0] == 1

    @pytest.mark.parametrize("text", [None, "", "\n \n"])
    def test_no_prompts(self, capsys, tmp_path, text):
        prompts = tmp_path / "prompts.txt"
        if text is not None:
            prompts.write_text(text)
        code, _, err = call("check", "--prompts", prompts)
        assert code == 2
        assert err.count("\n") == 1

import pytest
import torch

from models import SUPPORTED, make, plain, random_prompts
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError
from token_recycling.compare import plain_generate

QUESTION = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he now?"}]


@pytest.fixture
def recycler(bundled):
    bundled.reset()
    return bundled


def test_generate_and_stream_agree_with_transformers(recycler):
    answer = recycler.generate(QUESTION, max_new_tokens=60)
    assert answer.token_ids == plain_generate(recycler, QUESTION, {"max_new_tokens": 60})
    recycler.reset()
    chunks = list(recycler.stream(QUESTION, max_new_tokens=60))
    assert [c.token_id for c in chunks] == answer.token_ids
    assert "".join(c.text for c in chunks) == answer.text
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == answer.finish_reason
    assert sum(c.from_draft for c in chunks) >= chunks[-1].stats.accepted == answer.stats.accepted


def test_statistics_add_up(recycler):
    stats = recycler.generate(QUESTION, max_new_tokens=60).stats
    assert stats.new_tokens == 1 + stats.steps + stats.accepted
    assert sum(stats.accepted_per_depth) == stats.accepted
    assert stats.accepted_per_depth == sorted(stats.accepted_per_depth, reverse=True)
    assert stats.accepted <= stats.drafted
    assert stats.mat == pytest.approx((stats.new_tokens - 1) / stats.steps)
    assert stats.to_dict()["seconds"].keys() == {"draft", "verify", "accept", "observe", "commit"}
    assert stats.tokens_per_second > 0 < stats.prefill_tokens_per_second


def test_hot_start_helps_and_reset_makes_it_cold(recycler):
    cold = recycler.generate(QUESTION, max_new_tokens=60).stats
    hot = recycler.generate(QUESTION, max_new_tokens=60).stats
    assert hot.steps < cold.steps
    recycler.reset()
    assert recycler.matrix.rows_seen == 0
    assert recycler.generate(QUESTION, max_new_tokens=60).stats.steps == cold.steps


def test_a_matrix_travels(recycler, tmp_path):
    recycler.generate(QUESTION, max_new_tokens=60)
    recycler.matrix.save(tmp_path / "m.safetensors")
    hot = recycler.generate(QUESTION, max_new_tokens=60).stats.steps
    other = TokenRecycling(recycler.model, recycler.tokenizer, matrix=tmp_path / "m.safetensors")
    assert other.generate(QUESTION, max_new_tokens=60).stats.steps == hot


def test_a_matrix_of_another_tokenizer_is_refused(recycler):
    stranger = AdjacencyMatrix(4096, fingerprint="4096-0123456789abcdef")
    with pytest.raises(TokenRecyclingError, match="another tokenizer"):
        TokenRecycling(recycler.model, recycler.tokenizer, matrix=stranger)
    with pytest.raises(TokenRecyclingError, match="4095"):
        TokenRecycling(recycler.model, recycler.tokenizer, matrix=AdjacencyMatrix(4095))


def test_stop_strings_in_the_middle_of_a_path(recycler):
    whole = recycler.generate(QUESTION, max_new_tokens=80)
    for stop in (whole.text[5:9], whole.text[12:20], "\n"):
        if stop not in whole.text:
            continue
        recycler.generate(QUESTION, max_new_tokens=80)  # hot: long paths are accepted
        answer = recycler.generate(QUESTION, max_new_tokens=80, stop=[stop, "@@@"])
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.finish_reason == "stop"
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert stop in recycler.tokenizer.decode(answer.token_ids)
        assert stop not in recycler.tokenizer.decode(answer.token_ids[:-1])
        streamed = "".join(c.text for c in recycler.stream(QUESTION, max_new_tokens=80, stop=stop))
        assert streamed == answer.text


def test_leaving_a_stream_early_harms_nothing(recycler):
    whole = recycler.generate(QUESTION, max_new_tokens=60).token_ids
    for leave in (1, 2, 5, 11):
        stream = recycler.stream(QUESTION, max_new_tokens=60)
        seen = [next(stream).token_id for _ in range(leave)]
        stream.close()
        assert seen == whole[:leave]
        assert recycler.generate(QUESTION, max_new_tokens=60).token_ids == whole
        again = recycler.generate(QUESTION, max_new_tokens=60, keep_context=True)
        assert again.token_ids == whole


def test_a_conversation_is_not_read_twice(recycler):
    read = []

    def on_progress(done, total):
        read.append((done, total))

    first = recycler.generate(QUESTION, max_new_tokens=40)
    longer = [
        *QUESTION,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And with 5 more?"},
    ]
    fresh = recycler.generate(longer, max_new_tokens=40)
    recycler.generate(QUESTION, max_new_tokens=40)
    before = recycler.target.cache.end
    kept = recycler.generate(longer, max_new_tokens=40, keep_context=True, on_progress=on_progress)
    assert kept.token_ids == fresh.token_ids
    assert before > len(recycler._context) // 3
    calls = []
    recycler.generate(QUESTION, max_new_tokens=5)
    forward = recycler.target._forward
    try:
        recycler.target._forward = lambda tokens, *rest: (
            calls.append(tokens.shape[1]) or forward(tokens, *rest)
        )
        recycler.generate(QUESTION, max_new_tokens=5, keep_context=True)
    finally:
        recycler.target._forward = forward
    assert calls[0] == 1  # only the last token of the prompt


def test_batches_of_texts(recycler):
    prompts = ["Once upon a time", "The king", "It was a dark night and"]
    single = [recycler.generate(p, max_new_tokens=30) for p in prompts]
    batch = recycler.generate(prompts, max_new_tokens=30)
    assert [a.text for a in batch] == [a.text for a in single]
    assert [a.stats.prompt_tokens for a in batch] == [a.stats.prompt_tokens for a in single]


def test_k_reaches_the_drafts(recycler):
    model = make(SUPPORTED, "llama")
    for k in (1, 3):
        small = TokenRecycling(model, k=k)
        assert small.matrix.k == k
        assert small.template.max_rank < k
        prompt = random_prompts([9])[0]
        assert small.generate(prompt, max_new_tokens=40).token_ids == plain(model, prompt, 40)


def test_a_model_moved_by_a_device_map():
    pytest.importorskip("accelerate")
    recycler = TokenRecycling.from_pretrained(device_map="cpu")
    assert recycler.generate("The king", max_new_tokens=5).stats.new_tokens == 5


def test_half_precision_emits_plain_argmaxes(recycler):
    """bfloat16: every emitted token is the plain argmax, or within 0.25 of it in logits."""
    half = TokenRecycling.from_pretrained(device="cpu", dtype="bfloat16", tree="paper")
    answer = half.generate(QUESTION, max_new_tokens=50)
    from token_recycling.text import encode

    prompt = encode(half.tokenizer, QUESTION)
    ids = torch.tensor([prompt + answer.token_ids])
    with torch.inference_mode():
        logits = half.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert float((logits.max(dim=1).values - chosen).max()) <= 0.25

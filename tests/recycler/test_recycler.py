import pytest
import torch

from architectures import make
from models import plain, random_prompts
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError
from token_recycling.bench.compare import plain_generate
from token_recycling.bench.prompts import DEMO
from token_recycling.decoding.text import encode
from token_recycling.model.prefix_cache import REREAD

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
    other = TokenRecycling(
        recycler.model, recycler.tokenizer, nodes=16, matrix=tmp_path / "m.safetensors"
    )
    assert other.generate(QUESTION, max_new_tokens=60).stats.steps == hot


def test_a_matrix_of_another_tokenizer_is_refused(recycler):
    stranger = AdjacencyMatrix(4096, fingerprint="4096-0123456789abcdef")
    with pytest.raises(TokenRecyclingError, match="a different tokenizer"):
        TokenRecycling(recycler.model, recycler.tokenizer, matrix=stranger)
    with pytest.raises(TokenRecyclingError, match="4095"):
        TokenRecycling(recycler.model, recycler.tokenizer, matrix=AdjacencyMatrix(4095))


@pytest.mark.parametrize(
    "options, says",
    [
        ({"strict": "no"}, "strict is 'no'; it must be True or False"),
        ({"float32_logits": 1}, "float32_logits is 1; it must be True or False"),
        ({"queue": 7}, "queue is 7; it must be True or False"),
        ({"drafter": "none", "nodes": 5}, "the drafter none drafts nothing; leave nodes out"),
        ({"drafter": "paper", "tree": ""}, "unknown tree"),
        ({"drafter": "paper", "tree": "chain-0"}, "N of chain-N is 1 to 200"),
        ({"drafter": "paper", "tree": "chain-9999999"}, "N of chain-N is 1 to 200"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(recycler, options, says):
    with pytest.raises(TokenRecyclingError, match=says):
        TokenRecycling(recycler.model, recycler.tokenizer, **options)


def test_prompt_lookup_copies_as_many_tokens_as_asked(recycler):
    other = TokenRecycling(recycler.model, recycler.tokenizer, drafter="prompt-lookup", nodes=30)
    text = [*range(10, 60), 10, 11]
    rows = other.drafter.new_state(1)
    other.drafter.load(rows, [text[:-1]])
    draft = other.drafter.propose(rows, torch.tensor([11]), 31)
    assert draft.tokens[0].tolist() == [11, *range(12, 42)]


def test_stop_strings_in_the_middle_of_a_path(recycler):
    whole = recycler.generate(QUESTION, max_new_tokens=80)
    for stop in (whole.text[5:9], whole.text[12:20], whole.text[30]):
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


@pytest.fixture
def forwards(recycler, monkeypatch):
    """The number of tokens of every forward, as they come."""
    sizes, forward = [], recycler.target._forward

    def counting(tokens, *rest, **options):
        sizes.append(tokens.shape[1])
        return forward(tokens, *rest, **options)

    monkeypatch.setattr(recycler.target, "_forward", counting)
    return sizes


def test_a_conversation_is_not_read_twice(recycler, forwards):
    first = recycler.generate(QUESTION, max_new_tokens=40)
    longer = [
        *QUESTION,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And with 5 more?"},
    ]
    length = len(encode(recycler.tokenizer, longer))
    forwards.clear()
    fresh = recycler.generate(longer, max_new_tokens=40)
    assert forwards[0] == length
    recycler.generate(QUESTION, max_new_tokens=40)
    forwards.clear()
    kept = recycler.generate(longer, max_new_tokens=40, keep_context=True)
    assert kept.token_ids == fresh.token_ids
    reread, read = forwards[:2]
    assert reread == REREAD
    assert read <= length - len(encode(recycler.tokenizer, QUESTION))
    assert kept.stats.prompt_tokens == read


def test_going_on_after_every_emitted_token(recycler, forwards):
    """The last token is emitted but not in the cache: it must be read again, and only it."""
    prompt = encode(recycler.tokenizer, QUESTION)
    first = recycler.generate(prompt, max_new_tokens=20)
    longer = [*prompt, *first.token_ids, 50, 60]
    forwards.clear()
    kept = recycler.generate(longer, max_new_tokens=20, keep_context=True)
    assert forwards[:2] == [REREAD, 3]
    assert kept.token_ids == recycler.generate(longer, max_new_tokens=20).token_ids


def test_a_stream_does_not_go_on_in_the_cache_of_another(recycler):
    expected = recycler.generate("The king", max_new_tokens=20).token_ids
    for disturb in (lambda: recycler.generate("Once", max_new_tokens=5), recycler.reset):
        stream = recycler.stream(QUESTION, max_new_tokens=60)
        for _ in range(3):
            next(stream)
        disturb()
        with pytest.raises(TokenRecyclingError, match="cannot continue"):
            list(stream)
        assert recycler.generate("The king", max_new_tokens=20).token_ids == expected


def test_a_stream_that_begins_late_keeps_the_right_context(recycler):
    expected = recycler.generate(QUESTION, max_new_tokens=20).token_ids
    late = recycler.stream(QUESTION, max_new_tokens=20, keep_context=True)
    recycler.generate("Once upon a time there was a king", max_new_tokens=5)
    assert [chunk.token_id for chunk in late] == expected


def test_a_stop_string_that_is_a_special_token(recycler):
    model, tokenizer = recycler.model, recycler.tokenizer
    question = [{"role": "user", "content": DEMO[0]}]
    whole = recycler.generate(question, max_new_tokens=100)
    assert whole.finish_reason == "eos"
    eos, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        answer = recycler.generate(question, max_new_tokens=100, stop=[tokenizer.eos_token])
    finally:
        model.generation_config.eos_token_id = eos
    assert answer.token_ids == whole.token_ids


@pytest.mark.parametrize(
    "option", ["attention_mask", "num_return_sequences", "max_length", "do_sample"]
)
def test_options_that_would_be_ignored_are_refused(recycler, option):
    with pytest.raises(TokenRecyclingError, match=f"{option} is not supported here"):
        recycler.generate(QUESTION, **{option: 1})


@pytest.mark.parametrize("own", [[None], "x", 5, [len, "x"]])
def test_processors_that_are_none_are_refused(recycler, own):
    with pytest.raises(TokenRecyclingError, match="must be a list of logits processors"):
        recycler.generate(QUESTION, logits_processor=own)


def test_truth_values_are_no_tokens(recycler):
    with pytest.raises(TokenRecyclingError, match="a prompt must be a string"):
        recycler.generate([True, True, True])


def test_two_sets_of_rotary_factors_limit_the_context():
    """Phi-3's longrope changes its factors at the original length, and with them every entry."""
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 48,
        "rope_theta": 10000.0,
    }
    model = make("phi3", rope_parameters=rope, original_max_position_embeddings=48)
    recycler = TokenRecycling(model, strict=True)
    prompt = random_prompts([20])[0]
    answer = recycler.generate(prompt, max_new_tokens=100)
    assert answer.token_ids == plain(model, prompt, 28)
    with pytest.raises(TokenRecyclingError, match="context of 48"):
        recycler.generate(random_prompts([48])[0])


def test_batches_of_texts(recycler):
    prompts = ["Once upon a time", "The king", "It was a dark night and"]
    single = [recycler.generate(p, max_new_tokens=30) for p in prompts]
    batch = recycler.generate(prompts, max_new_tokens=30)
    assert [a.text for a in batch] == [a.text for a in single]
    assert [a.stats.prompt_tokens for a in batch] == [a.stats.prompt_tokens for a in single]


def test_k_reaches_the_drafts(recycler):
    model = make("llama")
    for k in (1, 3):
        small = TokenRecycling(model, k=k)
        assert small.matrix.k == small.drafter.k == k
        prompt = random_prompts([9])[0]
        assert small.generate(prompt, max_new_tokens=40).token_ids == plain(model, prompt, 40)


def test_a_model_moved_by_a_device_map():
    pytest.importorskip("accelerate")
    recycler = TokenRecycling.from_pretrained(device_map="cpu")
    assert recycler.generate("The king", max_new_tokens=5).stats.new_tokens == 5


def test_half_precision_emits_plain_argmaxes(recycler):
    """bfloat16: every emitted token is the plain argmax, or within 0.25 of it in logits."""
    half = TokenRecycling.from_pretrained(device="cpu", dtype="bfloat16", nodes=80)
    answer = half.generate(QUESTION, max_new_tokens=50)
    prompt = encode(half.tokenizer, QUESTION)
    ids = torch.tensor([prompt + answer.token_ids])
    with torch.inference_mode():
        logits = half.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert float((logits.max(dim=1).values - chosen).max()) <= 0.25


@pytest.mark.parametrize("prompts, rows", [("whole", 40), ("part", 4), ("none", 0)])
def test_how_much_of_a_prompt_teaches(bundled, prompts, rows, monkeypatch):
    monkeypatch.setattr(bundled.target, "prompt_fraction", 0.1)
    for drafter in ("paper", "adaptive"):
        recycler = TokenRecycling(
            bundled.model, bundled.tokenizer, drafter=drafter, prompts=prompts, nodes=8
        )
        recycler.target.prompt_fraction = 0.1
        recycler.generate(list(range(300, 340)), max_new_tokens=1)
        assert recycler.matrix.rows_seen == rows


def test_only_the_published_method_learns_from_whole_prompts(bundled):
    for drafter, prompts in (("paper", "whole"), ("adaptive", "part"), ("none", "part")):
        recycler = TokenRecycling(bundled.model, bundled.tokenizer, drafter=drafter)
        assert recycler.drafter.prompts == prompts
    with pytest.raises(TokenRecyclingError, match="prompts is 'some'; choose from whole, part"):
        TokenRecycling(bundled.model, bundled.tokenizer, prompts="some")

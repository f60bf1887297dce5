import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from token_recycling import TokenRecyclingError
from token_recycling.decoding.text import TextStream, encode, is_batch


def feed(tokenizer, text, stop=()):
    stream = TextStream(tokenizer, stop)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ended = [stream.feed(token) for token in ids]
    stream.finish()
    return stream, ids, ended


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=40))
def test_the_pieces_are_the_text(bundled, text):
    stream, ids, _ = feed(bundled.tokenizer, text)
    assert "".join(stream.pieces) == bundled.tokenizer.decode(ids, skip_special_tokens=True)
    assert len(stream.pieces) == len(ids)


def test_characters_of_several_tokens_come_whole(bundled):
    stream, ids, _ = feed(bundled.tokenizer, "a€😀b")
    assert len(ids) > 4
    assert not any("\ufffd" in piece for piece in stream.pieces)


@settings(max_examples=80, deadline=None)
@given(st.text("ab ", min_size=1, max_size=30), st.text("ab ", min_size=1, max_size=4))
def test_the_text_ends_in_front_of_a_stop_string(bundled, text, stop):
    stream, _, ended = feed(bundled.tokenizer, text, [stop])
    assert stream.text == text.partition(stop)[0]
    assert any(ended) == (stop in text)


def test_of_several_stop_strings_the_one_that_is_complete_first_counts(bundled):
    stream, _, ended = feed(bundled.tokenizer, "one two three four", ["three four", "two t"])
    assert stream.text == "one "
    assert any(ended)


def test_what_may_begin_a_stop_string_is_held_back(bundled):
    stream = TextStream(bundled.tokenizer, ["END"])
    for token in bundled.tokenizer("so E", add_special_tokens=False).input_ids:
        stream.feed(token)
    assert stream.text == "so "
    stream.finish()
    assert stream.text == "so E"


def test_kinds_of_prompts(bundled):
    assert not is_batch("text")
    assert not is_batch([1, 2])
    assert not is_batch([{"role": "user", "content": "hi"}])
    assert is_batch(["a", "b"])
    assert is_batch([[1], [2, 3]])
    assert is_batch([[{"role": "user", "content": "hi"}]])
    tokenizer = bundled.tokenizer
    assert encode(tokenizer, "hi")[0] == tokenizer.bos_token_id
    chat = tokenizer.decode(encode(tokenizer, [{"role": "user", "content": "hi"}]))
    assert chat == "<|begin|><|user|>hi<|assistant|>"
    for wrong in ([1, "a"], 5, [{"role": "user"}, 3]):
        with pytest.raises(TokenRecyclingError):
            encode(tokenizer, wrong)
    with pytest.raises(TokenRecyclingError, match="chat template"):
        encode(tokenizer, [{"role": "user"}])
    with pytest.raises(TokenRecyclingError, match="without a tokenizer"):
        encode(None, "text")

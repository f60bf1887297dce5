"""A row: its tokens are written in one place, and its rules see every one of them."""

from __future__ import annotations

import pytest
import torch

from token_recycling.decoding.sequence import Sequence, at_most, at_token
from token_recycling.decoding.text import TextStream


def test_tokens_are_appended_until_a_rule_ends_the_row():
    row = Sequence([5, 6], [at_most(3), at_token({9})])
    assert (row.active, row.new_tokens, row.prompt_length) == (True, [], 2)
    assert [row.append(7), row.append(8)] == [None, None]
    assert row.append(9) == row.finish_reason == "eos"  # before the limit, which is reached too
    assert (row.active, row.tokens, row.new_tokens) == (False, [5, 6, 7, 8, 9], [7, 8, 9])


@pytest.mark.parametrize(
    ("reasons", "reported"),
    [
        (("length", "eos", "stop"), "eos"),
        (("length", "stop", None), "stop"),
        ((None, "length", None), "length"),
        ((None, None, None), None),
    ],
)
def test_every_rule_is_asked_and_the_first_reason_of_all_is_reported(reasons, reported):
    asked = []

    def rule(index):
        def ask(row):
            asked.append((index, row.tokens[-1]))
            return reasons[index]

        return ask

    row = Sequence([1], [rule(index) for index in range(3)])
    assert row.append(2) == reported
    assert asked == [(0, 2), (1, 2), (2, 2)]


def test_a_stop_string_ends_the_row(bundled):
    tokens = bundled.tokenizer("Once upon a time", add_special_tokens=False).input_ids
    row = Sequence([1], [at_most(50)], text=TextStream(bundled.tokenizer, ["upon"]))
    reasons = [row.append(token) for token in tokens if row.active]
    assert reasons[-1] == row.finish_reason == "stop"
    assert len(reasons) < len(tokens)
    assert row.text.text.strip() == "Once"


def test_the_callback_knows_whether_the_row_has_ended():
    seen = []
    row = Sequence(
        [1], [at_most(2)], on_append=lambda row: seen.append((row.tokens[-1], row.active))
    )
    row.append(4)
    row.append(5)
    assert seen == [(4, True), (5, False)]


def test_ids_follow_the_tokens_without_a_copy():
    row = Sequence([3, 4], padding=[0, 0])
    first = row.ids("cpu")
    assert first.tolist() == [[0, 0, 3, 4]]
    for token in range(5, 30):
        row.append(token)
        found = row.ids("cpu")
        assert found.tolist() == [[0, 0, *row.tokens]]
        assert row.padded_length == found.shape[1]
    row.append(90)
    row.append(91)  # two at once
    assert row.ids("cpu")[0, -2:].tolist() == [90, 91]
    assert row.ids("cpu").data_ptr() == row.ids("cpu").data_ptr()


def test_ids_may_be_written_to_by_other_peoples_code_inside_inference_mode():
    with torch.inference_mode():
        row = Sequence([3, 4])
        row.append(5)
        assert not row.ids("cpu").is_inference()


def test_tokens_of_a_given_cache_are_not_shown_to_processors():
    row = Sequence([0, 0, 0, 7, 8], unknown=3)
    row.append(9)
    assert row.ids("cpu").tolist() == [[7, 8, 9]]
    assert row.padded_length == 3
    assert row.new_tokens == [9]

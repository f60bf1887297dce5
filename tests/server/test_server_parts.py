"""The parts of the server one by one: queue, contexts, batch, tool calls, grammars, penalties."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from token_recycling import TokenRecycling
from token_recycling.model.kv_cache import RecyclingCache
from token_recycling.server.grammar import Grammars, call_grammar, json_grammar, limited
from token_recycling.server.penalties import PenaltyProcessor
from token_recycling.server.prefixes import PrefixCaches
from token_recycling.server.queue import FairQueue
from token_recycling.server.tools import CallParser, takes_tools

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'


class TestFairQueue:
    def test_callers_are_served_in_turn(self):
        queue = FairQueue()
        for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
            queue.put(item[0], item)
        assert queue.next() == "a1"
        assert [queue.pop() for _ in range(len(queue))] == ["a1", "b1", "c1", "a2", "c2", "a3"]
        assert queue.next() is None

    def test_a_new_caller_waits_for_one_turn_only(self):
        queue = FairQueue()
        for number in range(100):
            queue.put("many", number)
        queue.pop()
        queue.put("one", "new")
        assert [queue.pop(), queue.pop()] == [1, "new"]

    def test_who_has_most_makes_room(self):
        queue = FairQueue()
        for item in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            queue.put(item[0], item)
        assert queue.make_room("c", 1, 1) == ["a4"]  # its newest
        assert queue.make_room("c", 1, 2) is None  # c would have 2, and only a has more
        assert len(queue) == 6
        assert queue.make_room("a", 1, 1) is None
        assert queue.make_room("d", 1, 3) == ["a3", "a2", "b2"]
        assert list(queue) == ["a1", "b1", "c1"]

    def test_removing(self):
        queue = FairQueue()
        queue.put("a", "x")
        assert queue.remove("x")
        assert not queue.remove("x")
        assert len(queue) == 0
        with pytest.raises(KeyError):
            queue.pop()


def cache(tokens, layers=1, first=0.0):
    """A cache of one row; a token has 8 bytes in every layer."""
    made = RecyclingCache(layers, 1)
    made.reserve(tokens)
    entries = first + torch.arange(float(tokens)).reshape(1, 1, tokens, 1)
    for layer in made.layers:
        layer.update(entries, -entries)
    made.lengths = [tokens]
    return made.copy(0)


class TestPrefixCaches:
    def test_the_least_recently_used_go_first(self):
        kept = PrefixCaches(8 * 25)
        for start in (100, 200):
            kept.keep("", [start] * 10, cache(10))
        kept.take(*kept.find("", [100] * 5))
        kept.keep("", [300] * 10, cache(10))
        assert kept.find("", [200])[1] == 0
        assert kept.find("", [100])[1] == 1
        assert kept.nbytes == 8 * 20

    def test_what_is_larger_than_the_limit_is_not_kept(self):
        kept = PrefixCaches(8 * 9)
        kept.keep("", list(range(10)), cache(10))
        assert (len(kept), kept.nbytes) == (0, 0)

    def test_owners_do_not_share(self):
        kept = PrefixCaches(1000)
        kept.keep("one", [1, 2, 3], cache(3))
        assert kept.find("other", [1, 2, 3])[1] == 0

    def test_a_longer_text_replaces_its_beginning(self):
        kept = PrefixCaches(1000)
        kept.keep("", [1, 2, 3], cache(3))
        kept.keep("other", [1, 2], cache(2))
        kept.keep("", [1, 2, 3, 4], cache(4))
        assert len(kept) == 2
        assert kept.find("", [1, 2, 3, 4, 5])[1] == 4

    def test_the_longest_beginning_is_found(self):
        kept = PrefixCaches(1000)
        kept.keep("", [1, 2, 9], cache(3))
        kept.keep("", [1, 2, 3, 9], cache(4))
        kept.keep("", [1, 9], cache(2))
        key, length = kept.find("", [1, 2, 3, 4])
        assert length == 3
        assert kept.take(key, length).lengths == [3]
        assert kept.find("", [5])[1] == 0

    def test_a_text_that_is_needed_whole_is_moved(self):
        kept = PrefixCaches(1000)
        kept.keep("", [1, 2, 3], cache(3))
        part = kept.take(*kept.find("", [1, 2, 9]))
        assert part.lengths == [2]
        assert part.layers[0].values.flatten().tolist() == [0, -1]
        whole = kept.take(*kept.find("", [1, 2, 3, 4]))
        assert whole.lengths == [3]
        assert (len(kept), kept.nbytes) == (0, 0)


def batch_cache(lengths):
    """A cache with a row of each length; entry i of row b is 100 b + i."""
    made, *others = [cache(length, 2, 100.0 * row) for row, length in enumerate(lengths)]
    for other in others:
        made.append(other)
    return made


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 2**31))
def test_rows_that_join_and_leave_keep_their_entries(lengths, seed):
    made, rows = batch_cache(lengths), list(enumerate(lengths))
    order = random.Random(seed)
    while len(rows) > 1:
        leaving = order.randrange(len(rows))
        own = made.copy(leaving)
        number, length = rows[leaving]
        for layer in own.layers:
            wanted = (100.0 * number + torch.arange(float(length))).tolist()
            assert layer.keys.flatten().tolist() == wanted
            assert (-layer.values).flatten().tolist() == wanted
        made.remove(leaving)
        rows[leaving] = rows[-1]
        rows.pop()
        assert made.lengths == [length for _, length in rows]
        for layer in made.layers:
            assert layer.keys.shape[0] == len(rows)
            for at, (number, length) in enumerate(rows):
                assert layer.keys[at, 0, 0, 0] == 100.0 * number
                assert layer.values[at, 0, length - 1, 0] == -(100.0 * number + length - 1)


class TestCallParser:
    def parsed(self, text, cuts):
        """Content and calls of a text that comes in pieces."""
        parser, content, calls = CallParser(), "", []
        bounds = [0, *sorted(cuts), len(text)]
        for begin, end in itertools.pairwise(bounds):
            new = parser.feed(text[begin:end])
            content += new.content
            calls += new.calls
        new = parser.feed("", last=True)
        found = [tuple(call["function"].values()) for call in [*calls, *new.calls]]
        return content + new.content, found

    @given(st.lists(st.integers(0, 200), max_size=12))
    def test_pieces_do_not_matter(self, cuts):
        text = f"Let me look.\n\n{CALL}\n{CALL}"
        cuts = [min(cut, len(text)) for cut in cuts]
        assert self.parsed(text, cuts) == (
            "Let me look.",
            [("clock", '{"zone": "CET"}')] * 2,
        )

    @given(st.text(alphabet="<tol_cal> \nx", max_size=40), st.lists(st.integers(0, 40), max_size=8))
    def test_text_without_calls_is_content(self, text, cuts):
        cuts = [min(cut, len(text)) for cut in cuts]
        assert self.parsed(text, cuts) == (text, [])

    @pytest.mark.parametrize(
        "body", ["no json", "[]", '{"arguments": {}}', '{"name": 1}', "[" * 100_000]
    )
    def test_what_is_no_call_is_content(self, body):
        text = f"<tool_call>{body}</tool_call>"
        assert self.parsed(text, [5]) == (text, [])

    def test_a_call_that_is_cut_off_is_content(self):
        assert self.parsed(f"So: {CALL[:-5]}", []) == (f"So: {CALL[:-5]}", [])

    def test_after_calls_a_call_that_is_cut_off_is_dropped(self):
        found = self.parsed(f"{CALL}\n{CALL[:-20]}", [70])
        assert found == ("", [("clock", '{"zone": "CET"}')])

    def test_identifiers_differ(self):
        calls = CallParser().feed(CALL + CALL).calls
        assert len({call["id"] for call in calls}) == 2


@pytest.fixture(scope="module")
def recycler():
    return TokenRecycling.from_pretrained(device="cpu")


@pytest.fixture(scope="module")
def grammars(recycler):
    eos = [recycler.model.generation_config.eos_token_id]
    return Grammars(recycler.tokenizer, recycler.target.vocab_size, eos)


FUNCTIONS = [
    {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
    {"name": "stop"},
]
OTHER = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


class TestCallGrammar:
    def accepts(self, recycler, grammars, grammar, text):
        """True if the grammar allows a text to end there."""
        matcher = LLMatcher(grammars.tokens, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = recycler.tokenizer(text, add_special_tokens=False).input_ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    @pytest.mark.parametrize(
        "forced, several, right, wrong",
        [
            (False, True, ["Hello.", CALL, f"Look: {CALL}\n{OTHER}"], [CALL[:-5]]),
            (False, False, ["Hello.", CALL, f"Look: {CALL}"], [f"{CALL}\n{OTHER}"]),
            (True, True, [CALL, f"{CALL}\n{OTHER}"], ["Hello.", f"Look: {CALL}", ""]),
            (True, False, [CALL, OTHER], ["Hello.", f"{CALL}\n{OTHER}"]),
        ],
    )
    def test_what_it_allows(self, recycler, grammars, forced, several, right, wrong):
        grammar = call_grammar(FUNCTIONS, forced=forced, several=several)
        for text in right:
            assert self.accepts(recycler, grammars, grammar, text), text
        for text in [*wrong, CALL.replace("clock", "other"), CALL.replace('"CET"', "5")]:
            assert not self.accepts(recycler, grammars, grammar, text), text

    def test_white_space_is_limited(self, recycler, grammars):
        grammar = json_grammar({"type": "object"})
        assert self.accepts(recycler, grammars, grammar, '{ "a": 1 }')
        assert not self.accepts(recycler, grammars, grammar, "{" + " " * 30 + "}")


class TestLimitedSchemas:
    """Objects without ``additionalProperties`` are closed, if that leaves what is required."""

    CLOSED = {"properties": {"a": {}}, "additionalProperties": False}

    def limited(self, schema):
        made = limited(schema)
        assert made.pop("x-guidance")
        return made

    @pytest.mark.parametrize("around", ["properties", "$defs", "definitions"])
    def test_objects_are_closed(self, around):
        assert self.limited({"properties": {"a": {}}}) == self.CLOSED
        inner = self.limited({around: {"b": {"properties": {"a": {}}}}})
        assert inner[around]["b"] == self.CLOSED

    def test_those_in_lists_too(self):
        assert self.limited({"items": {"properties": {"a": {}}}})["items"] == self.CLOSED
        assert self.limited({"anyOf": [{"properties": {"a": {}}}, True]})["anyOf"] == [
            self.CLOSED,
            True,
        ]

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "object"},
            {"properties": {"a": {}}, "additionalProperties": True},
            {"properties": {"a": {}}, "patternProperties": {"b": {}}},
            {"properties": {"a": {}}, "required": ["a", "b"]},
            {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
            {"properties": {"c": {"$ref": "#/$defs/c"}}, "allOf": [], "$defs": {"c": {}}},
            {"properties": [], "required": 5, "items": 3, "anyOf": "x", "$defs": None},
        ],
    )
    def test_others_are_left(self, schema):
        assert self.limited(schema) == schema


def test_a_grammar_that_gives_up_says_so_and_raises_nothing(grammars):
    processor = grammars.processor(grammars.matcher(json_grammar({"type": "object"})), 0)
    scores = torch.zeros(1, 4096)
    assert torch.isinf(processor(torch.zeros(1, 0, dtype=torch.int64), scores)).any()
    assert processor.problem is None
    wrong = torch.tensor([[10, 11, 12]])  # tokens that it has ruled out
    assert torch.equal(processor(wrong, scores), scores)
    assert processor.problem
    assert torch.equal(processor(torch.cat([wrong, wrong], dim=1), scores), scores)


def test_penalties_are_those_of_openai():
    """Logit − presence · [count > 0] − frequency · count, counted in the answer only."""
    processor = PenaltyProcessor(2, presence=0.5, frequency=0.25)
    found = processor(torch.tensor([[3, 3, 1, 1, 2]]), torch.zeros(1, 4))
    assert found.tolist() == [[0, -1.0, -0.75, 0]]
    assert processor(torch.tensor([[3, 3]]), torch.zeros(1, 4)).tolist() == [[0, 0, 0, 0]]


def test_templates_without_tool_calls_take_none(recycler):
    class Tokenizer:
        chat_template = None

    assert takes_tools(recycler.tokenizer)
    assert not takes_tools(Tokenizer())
    Tokenizer.chat_template = "{{ messages }}"
    assert not takes_tools(Tokenizer())


def test_schemas_are_json(grammars):
    assert "whitespace_pattern" in json.dumps(json_grammar({"type": "object"}))

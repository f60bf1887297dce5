import json
from collections import Counter
from pathlib import Path

import pytest

from token_recycling import BUNDLED_MODEL, TokenRecyclingError
from token_recycling.bench.prompts import DEMO
from token_recycling.bench.suites import PUBLIC, Question, choose, load, load_all

DATA = Path(__file__).parents[3] / "shared" / "data"
SPEC_BENCH = {"mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"}
LOW_REDUNDANCY = {"poem", "names", "novelty", "languages"}


@pytest.fixture(scope="module")
def builtin():
    return load("builtin")


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))


@pytest.fixture
def own(tmp_path):
    """Writes a suite of one's own and gives its path."""

    def write(content, name="mine.jsonl"):
        path = tmp_path / name
        if isinstance(content, list):
            content = "\n".join(map(json.dumps, content))
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def made(kind, number, suite="s"):
    return [Question(suite, f"{kind}{i}", kind, kind, ("?",)) for i in range(number)]


# The suite of our own


def test_the_builtin_suite_has_every_kind(builtin):
    counts = Counter(question.kind for question in builtin)
    assert set(counts) == SPEC_BENCH | LOW_REDUNDANCY | {"code"}
    assert all(6 <= count <= 8 for count in counts.values())
    assert len(builtin) >= 72
    assert all(q.suite == "builtin" and q.kind == q.category for q in builtin)


def test_the_builtin_questions_are_numbered_from_1(builtin):
    assert [question.id for question in builtin] == [str(i + 1) for i in range(len(builtin))]
    assert builtin[0].name == "builtin/1"


def test_two_turns_are_for_mt_bench(builtin):
    assert all(len(q.turns) == (2 if q.kind == "mt_bench" else 1) for q in builtin)


def test_no_builtin_prompt_stands_twice_or_warms_up(builtin):
    turns = [turn for question in builtin for turn in question.turns]
    assert len(set(turns)) == len(turns)
    assert not {" ".join(turn.split()) for turn in turns} & set(DEMO)
    openings = Counter(" ".join(turn.split()[:4]) for turn in turns)
    assert max(openings.values()) == 1


def test_the_builtin_prompts_are_of_many_lengths_and_none_is_long(builtin, tokenizer):
    lengths = [[len(tokenizer(turn).input_ids) for turn in q.turns] for q in builtin]
    assert max(length for turns in lengths for length in turns) <= 700
    assert max(map(sum, lengths)) <= 900
    assert min(map(sum, lengths)) < 30
    assert len(set(map(sum, lengths))) > 40


@pytest.mark.parametrize("kind,fewest,most", [("summarization", 120, 250), ("rag", 150, 300)])
def test_the_builtin_texts_to_read(builtin, kind, fewest, most):
    for question in builtin:
        if question.kind == kind:
            assert fewest <= len(question.turns[0].split()) <= most, question.name


# Public suites, where they are


@pytest.mark.parametrize(
    "name,file,number,kinds",
    [
        ("spec-bench", "spec_bench/question.jsonl", 480, dict.fromkeys(sorted(SPEC_BENCH), 80)),
        ("mbpp", "mbpp/question.jsonl", 399, {"code": 399}),
        ("gsm8k", "gsm8k_test.jsonl", 1319, {"gsm8k": 1319}),
    ],
)
def test_public_suites(name, file, number, kinds):
    if not (DATA / file).exists():
        pytest.skip(f"no {file} here")
    questions = load(f"{name}={DATA / file}")
    assert len(questions) == number
    assert Counter(question.kind for question in questions) == kinds
    assert {question.suite for question in questions} == {name}
    chosen = choose(questions, 3)
    assert len(chosen) == 3 * len(kinds)
    assert [question.kind for question in chosen] == list(dict.fromkeys(q.kind for q in chosen)) * 3


def test_spec_bench_groups_the_categories_of_mt_bench(own):
    path = own(
        [
            {"question_id": 81, "category": "stem", "turns": ["a", "b"], "reference": ["", ""]},
            {"question_id": 82, "category": "qa", "turns": ["c"]},
        ]
    )
    assert load(f"spec-bench={path}") == [
        Question("spec-bench", "81", "mt_bench", "stem", ("a", "b")),
        Question("spec-bench", "82", "qa", "qa", ("c",)),
    ]
    assert [question.kind for question in load(path)] == ["stem", "qa"]


def test_gsm8k_is_numbered_by_line(own):
    path = own('{"question": "1+1?", "answer": "#### 2"}\n\n{"question": "2+2?", "answer": "4"}\n')
    assert load(f"gsm8k={path}") == [
        Question("gsm8k", "1", "gsm8k", "gsm8k", ("1+1?",)),
        Question("gsm8k", "3", "gsm8k", "gsm8k", ("2+2?",)),
    ]


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("equals", ["", "="])
def test_a_public_suite_needs_a_path(name, equals):
    with pytest.raises(TokenRecyclingError, match=f"write {name}=PATH"):
        load(name + equals)


# Files of one's own


@pytest.mark.parametrize(
    "row,question",
    [
        ({"prompt": "p"}, Question("mine", "1", "mine", "mine", ("p",))),
        ({"question": "q", "id": "x"}, Question("mine", "x", "mine", "mine", ("q",))),
        ({"turns": ["a", "b"], "kind": "k"}, Question("mine", "1", "k", "k", ("a", "b"))),
        ({"prompt": "p", "category": "math"}, Question("mine", "1", "math", "math", ("p",))),
        ({"prompt": "p", "question_id": 0}, Question("mine", "0", "mine", "mine", ("p",))),
        ({"prompt": "p", "answer": "a"}, Question("mine", "1", "mine", "mine", ("p",))),
        (
            {"turns": ["a", "b"], "answer": ["c", "d"], "else": None},
            Question("mine", "1", "mine", "mine", ("a", "b")),
        ),
    ],
)
def test_a_line_of_ones_own(row, question, own):
    assert load(own([row])) == [question]


def test_a_text_is_kept_as_it_is(own):
    text = " Schöne\u2028Grüße\r\n\t😀 "
    assert load(own(json.dumps({"prompt": text}, ensure_ascii=False)))[0].turns == (text,)


def test_byte_order_mark_windows_lines_and_blank_ones(own):
    path = own(b'\xef\xbb\xbf{"prompt": "a"}\r\n \r\n{"prompt": "b"}\r\n\r\n')
    assert [(question.id, question.turns) for question in load(path)] == [
        ("1", ("a",)),
        ("3", ("b",)),
    ]


def test_home_is_found(own, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(own([{"prompt": "a"}])).parent))
    assert load("~/mine.jsonl")[0].suite == "mine"
    assert load("mbpp=~/mine.jsonl")[0].suite == "mbpp"


GOOD = b'{"prompt": "good"}\n'


@pytest.mark.parametrize(
    "line,message",
    [
        ("What?", "invalid JSON .Expecting value"),
        ('{"prompt": "p"', "invalid JSON"),
        ("[" * 100_000, "invalid JSON"),
        ('{"prompt": "p"} {"prompt": "p"}', "invalid JSON"),
        ("[", "invalid JSON"),
        ("[]", "not a JSON object"),
        ('[{"prompt": "p"}]', "not a JSON object"),
        ('"p"', "not a JSON object"),
        ("null", "not a JSON object"),
        (b'{"prompt": "\xe9"}', "not valid UTF-8"),
        ('{"prompt": "p"}'.encode("utf-16"), "not valid UTF-8"),
        ("{}", "one of turns, prompt, question; found 0"),
        ('{"text": "p"}', "one of turns, prompt, question; found 0"),
        ('{"prompt": "p", "turns": ["p"]}', "one of turns, prompt, question; found 2"),
        ('{"messages": [{"role": "user", "content": "p"}]}', '"messages" is not supported'),
        ('{"prompt": "p", "messages": []}', '"messages" is not supported'),
        ('{"prompt": ["p"]}', '"prompt" must be a string$'),
        ('{"question": null}', '"question" must be a string$'),
        ('{"prompt": 5}', '"prompt" must be a string$'),
        ('{"turns": "p"}', '"turns" must be a list of strings'),
        ('{"turns": ["p", 5]}', '"turns" must be a list of strings'),
        ('{"turns": {"1": "p"}}', '"turns" must be a list of strings'),
        ('{"prompt": ""}', '"prompt" must not be empty'),
        ('{"turns": []}', '"turns" must not be empty'),
        ('{"turns": ["p", " \\n"]}', '"turns" must not be empty'),
        ('{"prompt": "\\ud83d"}', '"prompt" contains an unpaired surrogate'),
        ('{"prompt": "p", "id": "1"}', "the id 1 is used twice"),
        ('{"prompt": "p", "question_id": 1}', "the id 1 is used twice"),
        ('{"prompt": "p", "id": true}', '"id" must be an integer'),
        ('{"prompt": "p", "id": 1.5}', '"id" must be an integer'),
        ('{"prompt": "p", "question_id": null}', '"question_id" must be an integer'),
        ('{"prompt": "p", "id": " "}', '"id" must be an integer or one line of text'),
        ('{"prompt": "p", "kind": []}', '"kind" must be an integer or one line of text'),
        (
            '{"prompt": "p", "category": "a\\nb"}',
            '"category" must be an integer or one line of text',
        ),
    ],
)
def test_a_wrong_line_is_named(line, message, own):
    path = own(GOOD + b"\n" + (line.encode() if isinstance(line, str) else line))
    with pytest.raises(TokenRecyclingError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(path) + 120


@pytest.mark.parametrize("content", ["", "\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_named(content, own):
    path = own(content)
    with pytest.raises(TokenRecyclingError, match="contains no questions") as caught:
        load(path)
    assert path in str(caught.value)


@pytest.mark.parametrize("suite", ["nothing.jsonl", "gsm8k=nothing.jsonl", "builtins", "a=b", ""])
def test_a_missing_file_is_named(suite, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenRecyclingError, match=r"cannot read .*a suite is builtin, spec-bench="):
        load(suite)


# The choice


@pytest.mark.parametrize(
    "number,per_kind,chosen",
    [
        (8, 1, [0]),
        (8, 2, [0, 4]),
        (8, 3, [0, 2, 5]),
        (8, 8, list(range(8))),
        (8, None, list(range(8))),
        (2, 5, [0, 1]),
        (1319, 4, [0, 329, 659, 989]),
    ],
)
def test_the_choice_is_spread_over_a_kind(number, per_kind, chosen):
    assert [q.id for q in choose(made("a", number), per_kind)] == [f"a{i}" for i in chosen]


def test_kinds_take_turns():
    questions = made("b", 3) + made("a", 1) + made("c", 2)
    assert [q.id for q in choose(questions)] == ["b0", "a0", "c0", "b1", "c1", "b2"]
    assert [q.id for q in choose(questions, 1)] == ["b0", "a0", "c0"]
    assert choose([]) == []


def test_the_same_kind_of_two_suites_is_two_kinds():
    questions = made("qa", 2, "x") + made("qa", 2, "y")
    assert [q.name for q in choose(questions, 1)] == ["x/qa0", "y/qa0"]


@pytest.mark.parametrize("per_kind", [0, -1])
def test_no_question_per_kind_is_refused(per_kind):
    with pytest.raises(TokenRecyclingError, match="must be 1 or more"):
        choose(made("a", 2), per_kind)


def test_several_suites(own, builtin):
    path = own([{"prompt": "a"}, {"prompt": "b"}])
    questions = load_all(["builtin", path], 1)
    kinds = list(dict.fromkeys(question.kind for question in builtin))
    assert [question.kind for question in questions] == [*kinds, "mine"]
    assert len(load_all(["builtin", path])) == len(builtin) + 2
    assert load_all([]) == []


def test_two_suites_of_one_name_are_refused(own):
    path = own([{"prompt": "a"}], "mbpp.jsonl")
    for suites in (["builtin", "builtin"], [path, f"mbpp={path}"]):
        with pytest.raises(TokenRecyclingError, match=r"two suites are called (builtin|mbpp)"):
            load_all(suites)

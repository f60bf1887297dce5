"""The benchmark: its figures by hand and by another script."""

import csv
import json
import random
from collections import Counter
from statistics import fmean, median

import pytest
import torch

from architectures import make
from command import call, write_suite
from letters import letters
from token_recycling import BUNDLED_MODEL, TokenRecycling, TokenRecyclingError
from token_recycling.bench import answer_files as answers
from token_recycling.bench import measures, runner, tables
from token_recycling.bench.decoders import Decoder
from token_recycling.bench.runner import Runner, conversation, fitting
from token_recycling.bench.suites import Question
from token_recycling.bench.summary import losing, sample, summarise
from token_recycling.bench.variants import DEFAULT, Variant, parse, select
from token_recycling.util import memory

TEXTS = (
    ("How many legs have 3 cats?",),
    ("Tell me a story of a fox.", "Go on."),
    ("Anna has 3 boxes with 6 pens each. How many pens has she?",),
    ("The king had a red hat. What had he?",),
    ("How many legs have 5 cats?",),
)
KINDS = ("math", "story", "math", "story", "math")
QUESTIONS = [
    Question("own", str(i), kind, kind, turns)
    for i, (turns, kind) in enumerate(zip(TEXTS, KINDS), start=1)
]
FIXED = "prompt-lookup,paper:nodes=8,adaptive:nodes=8"  # the sizes of auto follow the time


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def bench_of(suite, out, *more):
    return ["bench", "--suite", suite, "-o", out, "--threads", 1, *more]


def decode(first, decoders=FIXED, questions=QUESTIONS, **options):
    """Run without the command line; return the records and the runner."""
    run = {"max_new_tokens": 12, "rounds": 1, "seed": 0, "raw": False} | options
    running = Runner(first, select(decoders.split(",")), **run)
    notes = Notes()
    running.run(questions, notes, lambda done, total: None)
    return json.loads(json.dumps(notes.records, allow_nan=False)), running


class Notes:
    """A journal that writes nothing."""

    def __init__(self):
        self.records, self.states = [], {}

    def add(self, record, states):
        self.records.append(record)


def lengths(records, name, round_=0):
    return [[t["accept_lengths"] for t in measures.turns(r, name, round_)] for r in records]


def rows_before(records, name):
    return [record["variants"][name]["matrix_rows_before"] for record in records]


def forget_nothing(monkeypatch):
    """The negative control of whatever relies on a matrix being put back."""
    monkeypatch.setattr(Decoder, "restore", lambda self, state: None)


# Names


@pytest.mark.parametrize(
    "spec,expected",
    [
        ("generate", Variant("generate")),
        ("generate-pld", Variant("generate-pld", lookup=True)),
        ("auto", Variant("auto", "adaptive", k=12)),
        ("adaptive", Variant("adaptive", "adaptive", nodes=80, k=12)),
        ("adaptive:nodes=8", Variant("adaptive:nodes=8", "adaptive", nodes=8, k=12)),
        ("auto:k=16", Variant("auto:k=16", "adaptive", k=16)),
        ("paper", Variant("paper", "paper", k=8)),
        ("paper:nodes=8", Variant("paper:nodes=8", "paper", nodes=8, k=8)),
        ("paper:tree=chain-3", Variant("paper:tree=chain-3", "paper", tree="chain-3", k=8)),
        (
            "paper:k=4:tree=C:a@b.json:graph=no",
            Variant(
                "paper:k=4:tree=C:a@b.json:graph=no",
                "paper",
                tree="C:a@b.json",
                k=4,
                graph=False,
            ),
        ),
        ("paper:matrix=a=b", Variant("paper:matrix=a=b", "paper", matrix="a=b")),
        ("prompt-lookup", Variant("prompt-lookup", "prompt-lookup", nodes=10, k=12)),
        ("none", Variant("none", "none", k=12)),
    ],
)
def test_a_decoder_is_read(spec, expected):
    assert parse(spec) == expected


@pytest.mark.parametrize("spec", ["", "generat", "generate:k=4", "auto@paper", ":k=4", "Paper"])
def test_no_decoder_is_named_with_those_that_there_are(spec):
    with pytest.raises(
        TokenRecyclingError, match=r"no such decoder: .*generate-pld, auto, adaptive, paper"
    ):
        parse(spec)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("paper:sizes=4", "sizes is no setting; choose from nodes, tree, k, matrix, graph, p"),
        ("paper:k=4:k=5", "k is given twice"),
        ("paper:k=four", "k must be a whole number"),
        ("paper:graph=maybe", "graph must be yes or no"),
        ("auto:nodes=8", "write adaptive:nodes=N"),
        ("paper:cold=maybe", "cold must be yes or no"),
        ("paper:prompts=all", "prompts is 'all'; choose from whole, part, none"),
        ("prompt-lookup:k=4", "prompt-lookup keeps no matrix; leave k out"),
        ("none:cold=yes", "none keeps no matrix; leave cold out"),
        ("adaptive:tree=paper", "takes no tree"),
        ("paper:tree=no-tree", "no-tree"),
        ("paper:nodes=0", "nodes is 0"),
    ],
)
def test_a_wrong_setting(spec, message):
    with pytest.raises(TokenRecyclingError, match=message):
        parse(spec).check()


def test_the_baseline_is_always_there_and_first():
    chosen = select(["paper", "paper", "generate"])
    assert [variant.name for variant in chosen] == ["generate", "paper"]


def test_settings_with_several_values():
    spec = "paper:nodes=8|16:k=2|4"
    names = [f"paper:nodes={nodes}:k={k}" for nodes in (8, 16) for k in (2, 4)]
    assert [variant.name for variant in select([spec])] == ["generate", *names]
    assert select(["paper:k=2:nodes=8", spec]) == select([spec])
    assert [(v.nodes, v.k) for v in select([spec])[1:]] == [(8, 2), (8, 4), (16, 2), (16, 4)]
    with pytest.raises(TokenRecyclingError, match="k must be a whole number"):
        select(["paper:k=2|"])


def test_every_setting_is_in_the_figures():
    about = parse("paper:nodes=4:k=3:prompts=none:cold=yes").settings()
    assert about == {
        "drafter": "paper", "nodes": 4, "tree": None, "k": 3, "matrix": None, "graph": None,
        "prompts": "none", "cold": True,
    }  # fmt: skip


def test_a_tree_that_needs_more_candidates_is_refused(tmp_path):
    """As ``generate`` refuses it: a tree without these paths would be measured under its name."""
    (tmp_path / "t.json").write_text("[[0], [9], [0, 0]]")
    spec = f"paper:tree={tmp_path / 't.json'}"
    with pytest.raises(TokenRecyclingError, match=r"uses rank 9, but .*; it needs k=10"):
        parse(spec).check()
    assert parse(f"{spec}:k=10").check() == 10


def test_a_matrix_to_start_from(tmp_path, bundled):
    file = tmp_path / "learnt.safetensors"
    first = TokenRecycling(bundled.model, bundled.tokenizer, k=4)
    first.generate("Once upon a time", max_new_tokens=20)
    first.matrix.save(file)
    name = f"auto:matrix={file}"
    assert parse(name).check() == 4
    with pytest.raises(TokenRecyclingError, match="keeps k=4 candidates, not 5"):
        parse(f"{name}:k=5").check()
    cold = f"{name}:cold=yes"
    records, running = decode(bundled, f"auto,{name},{cold}", questions=QUESTIONS[:2])
    assert rows_before(records, "auto")[0] == 0
    assert rows_before(records, name)[0] == first.matrix.rows_seen
    assert rows_before(records, name)[1] > first.matrix.rows_seen
    assert rows_before(records, cold) == [first.matrix.rows_seen] * 2  # not emptied
    assert running.decoders[name].recycler.matrix.k == 4


def test_no_two_variants_share_an_answer_file():
    names = [
        "paper",
        "paper@a b",
        "paper@a_b",
        "paper@A_b",
        "paper@a/b",
        "Paper",
        "paper@" + "x" * 300,
    ]
    files = answers.file_names(names)
    assert list(files) == names
    assert len({name.lower() for name in files.values()}) == len(names)
    assert files["paper"] == "paper.jsonl"
    assert files["paper@a b"] == "paper@a_b.jsonl"
    assert max(map(len, files.values())) < 130
    assert not any("/" in name for name in files.values())


# Figures


def turn(tokens, seconds, accepted, *, sizes=(), identical=True, first=0.1, verify=0.0, step=0.1):
    return {
        "token_ids": [0] * tokens, "text": "", "seconds": seconds, "first_seconds": first,
        "accept_lengths": accepted, "sizes": list(sizes), "identical": identical, "seed": 7,
        "step_seconds": [step] * len(accepted),
        "phases": {"verify": verify, "draft": verify / 3} if verify else {},
    }  # fmt: skip


def record(number, suite="own", kind="math", **variants):
    """A line of the journal; a variant is a list of rounds, a round a list of turns."""
    return {
        "name": f"{suite}/{number}", "suite": suite, "id": str(number), "kind": kind,
        "category": kind, "prompt": "?", "time": 0.0,
        "variants": {
            name: {"matrix_rows_before": 0, "rounds": [{"turns": turns} for turns in rounds]}
            for name, rounds in variants.items()
        },
    }  # fmt: skip


HAND = [
    record(
        1,
        generate=[[turn(10, 1.0, [1] * 10, sizes=[1] * 10)]],
        own=[[turn(10, 0.5, [4, 1, 4], sizes=[9, 5, 9], first=0.2, verify=0.3, step=0.9)]],
    ),
    record(
        2,
        generate=[[turn(10, 2.0, [1] * 10, sizes=[1] * 10)] * 2],
        own=[[turn(10, 1.0, [3, 3, 3], sizes=[9, 9, 9], first=0.3, verify=0.6, step=0.2),
              turn(1, 3.2, [], first=0.4, identical=False)]],
    ),
    record(
        3,
        generate=[[turn(40, 1.0, [1] * 40, sizes=[1] * 40)]],
        own=[[turn(40, 2.0, [1, 2] * 13, sizes=[9] * 26, first=0.1, verify=0.9, step=0.3)]],
    ),
]  # fmt: skip


def test_the_figures_by_hand():
    found = measures.measure(HAND, "own")
    # tokens/s: 20, 11 / 4.2, 20 against 10, 5, 40
    assert found["tokens_per_second"] == 20
    assert found["speedup"] == pytest.approx(11 / 21)  # the median of 2, 11 / 21 and 0.5
    assert found["speedup"] != pytest.approx(20 / 10)  # not the ratio of medians
    quartiles = [(0.5 + 11 / 21) / 2, 11 / 21, (11 / 21 + 2) / 2]
    assert found["speedup_quartiles"] == pytest.approx(quartiles)
    assert found["slower_than_baseline"] == 2
    assert (found["questions"], found["tokens"]) == (3, 61)
    accepted = [4, 1, 4, 3, 3, 3, *[1, 2] * 13]
    assert found["mat"] == pytest.approx(sum(accepted) / 32)
    assert found["accepted_per_depth"] == pytest.approx([18 / 32, 5 / 32, 2 / 32])
    assert found["size"] == pytest.approx((23 + 27 + 9 * 26) / 32)
    assert found["identical"] == 0.75
    assert found["ttft_seconds"] == pytest.approx(0.25)
    assert found["forwards"] == 32
    assert found["c"] == pytest.approx(3)  # of 0.2, 0.3 and 0.9 s in steps of 0.1 s
    assert measures.step_costs(measures.every_turn(HAND, "own")) == [[5, 0.9, 1], [9, 0.3, 31]]
    assert found["phases"]["verify"] == pytest.approx(0.75)
    assert sum(found["phases"].values()) == pytest.approx(1)
    aggregate = measures.spec_bench(HAND, "own")
    assert aggregate["tokens_per_second"] == pytest.approx((20 + 11 / 4.2 + 20) / 3)
    assert aggregate["speedup"] == pytest.approx((20 + 11 / 4.2 + 20) / (10 + 5 + 40))
    assert aggregate["mat"] == found["mat"]
    low, high = found["speedup_interval"]
    assert low <= 11 / 21 <= high


def test_the_baseline_against_itself():
    found = measures.measure(HAND, "generate")
    assert found["speedup"] == found["c"] == found["mat"] == found["size"] == 1
    assert found["speedup_interval"] == [1, 1]
    assert found["accepted_per_depth"] == []
    assert found["phases"] is None


def test_nothing_but_first_tokens_divides_by_nothing():
    rows = [record(1, generate=[[turn(1, 0.1, [1], sizes=[1])]], own=[[turn(1, 0.2, [])]])]
    found = measures.measure(rows, "own")
    assert (found["mat"], found["speedup"], found["size"]) == (1.0, 0.5, None)
    assert (found["forwards"], found["c"]) == (0, None)
    aggregate = measures.spec_bench(rows, "own")
    assert aggregate == {"tokens_per_second": 5.0, "speedup": 0.5, "mat": 1.0}
    json.dumps(found, allow_nan=False)
    assert losing(rows, ["own"])[0]["mat"] == 1.0


def test_repeated_rounds_count_by_their_median_and_the_first_for_spec_bench():
    seconds = (1.0, 4.0, 2.0)
    own = [[turn(8, s, [8], identical=i != 2)] for i, s in enumerate(seconds)]
    rows = [record(1, generate=[[turn(8, 2.0, [1] * 8)]] * 3, own=own)]
    found = measures.measure(rows, "own")
    assert found["tokens_per_second"] == 4
    assert measures.spec_bench(rows, "own")["tokens_per_second"] == 8
    assert found["tokens"] == 8
    assert found["identical"] == pytest.approx(2 / 3)  # an error in a later round shows
    ratios = [measures.speedup(rows, "own", i) for i in range(3)]
    assert ratios == [2.0, 0.5, 1.0]
    assert measures.spread(ratios) == 1.5
    assert measures.spread([2.0]) is None


def test_the_interval_is_that_of_another_bootstrap():
    rng = random.Random(2)
    values = [rng.uniform(1, 3) for _ in range(40)]
    drawn = sorted(median(rng.choices(values, k=40)) for _ in range(2000))
    assert measures.interval(values) == pytest.approx([drawn[50], drawn[1949]], abs=0.06)
    assert measures.interval(values) != pytest.approx([drawn[200], drawn[1799]], abs=0.06)
    assert measures.interval([1.5]) == [1.5, 1.5]


@pytest.mark.parametrize(
    "tokens, expected",
    [
        ([1, 2, 3] * 20, True),
        ([*range(30), *[7] * 40], True),
        ([*range(40), *[7] * 30], False),
        ([*range(40), *range(10, 20), *range(10)], False),
        (list(range(100)), False),
        ([5], False),
        ([], False),
    ],
)
def test_an_answer_that_repeats_itself(tokens, expected):
    assert measures.repeats(tokens) is expected


def test_answers_that_repeat_themselves_are_not_counted(tmp_path, monkeypatch):
    """The headline is of the others; it names how many there are."""
    monkeypatch.setattr(measures, "repeating", lambda record: record["id"] in ("1", "3"))
    suite, folder = write_suite(tmp_path / "own.jsonl", QUESTIONS), tmp_path / "run"
    code, out, err = call(*bench_of(suite, folder, "-n", 4, "--decoders", "auto"))
    assert code == 0, err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["repeating"] == ["own/1", "own/3"]
    assert summary["decoders"]["auto"]["overall"]["questions"] == 3
    assert "2 of 5 questions are not counted: their answers repeat themselves" in out
    assert "So few questions say little about others" in out
    assert "the bundled model is a toy" in err
    assert "Not counted because their answers mostly repeat" in (folder / "report.html").read_text()


def test_kinds_are_told_apart_by_suite_where_there_are_several():
    one = [record(1, kind="qa"), record(2, kind="code"), record(3, kind="qa")]
    assert {k: len(v) for k, v in measures.by_kind(one).items()} == {"qa": 2, "code": 1}
    two = [*one, record(1, suite="other", kind="qa")]
    counts = {kind: len(rows) for kind, rows in measures.by_kind(two).items()}
    assert counts == {"own: qa": 2, "own: code": 1, "other: qa": 1}


def test_what_lost_and_a_sample():
    rows = losing(HAND, ["own"])
    assert [(row["name"], row["decoder"]) for row in rows] == [("own/3", "own"), ("own/2", "own")]
    assert rows[0]["speedup"] == 0.5
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))
    ids = tokenizer("The king had a red hat.").input_ids[1:7]
    shown = turn(6, 1.0, [3, 2])
    shown["token_ids"] = ids
    found = sample([record(1, own=[[shown]])], "own", tokenizer)
    assert "".join(text for text, _ in found["pieces"]) == tokenizer.decode(ids)
    assert [drafted for _, drafted in found["pieces"]] == [False, True, True, False, True, False]
    assert sample([], "own", tokenizer) is None


def test_an_answer_line():
    twice = [HAND[1]["variants"]["own"]["rounds"][0]["turns"], [turn(3, 0.5, [2])]]
    line = answers.line(record("007", own=twice), "own")
    assert line["question_id"] == "007"  # another question than 7
    assert answers.line(record(7, own=[]), "own")["question_id"] == 7
    assert [answers.line(record(i, own=[]), "own")["question_id"] for i in ("٣", "9" * 5000)] == [
        "٣", "9" * 5000,
    ]  # fmt: skip
    assert [choice["index"] for choice in line["choices"]] == [0, 1]
    first = line["choices"][0]
    assert first["new_tokens"] == [10, 1]
    assert first["wall_time"] == [1.0, 3.2]
    assert first["accept_lengths"] == [3, 3, 3]
    assert first["decoding_steps"] == [3, 0]


def test_a_table_bears_any_name():
    text = tables.markdown(tables.Table(["a|b", "c"], [["1", "2"]]))
    assert text.splitlines()[0] == "| a\\|b | c |"
    assert tables.OVERALL["tokens a step"]({"overall": {"size": None}}) == "–"


def test_the_peak_of_memory_begins_anew():
    cpu = torch.device("cpu")
    memory.reset_peak(cpu)
    before = memory.peak(cpu)
    if before is None:
        pytest.skip("this system does not say")
    block = torch.ones(64 << 18)  # 64 MiB
    with_it = memory.peak(cpu)
    assert with_it > before + (48 << 20)
    del block
    memory.reset_peak(cpu)
    if memory.peak(cpu) == with_it:
        pytest.skip("not allowed here")
    assert memory.peak(cpu) < with_it - (32 << 20)


# What is decoded


class Stub:
    """A decoder that only notes that it was asked."""

    def __init__(self, variant, asked):
        self.variant, self.asked, self.recycler = variant, asked, self
        self.options, self.matrix, self.rows_seen = {"max_new_tokens": 4}, self, 0

    def answer(self, prompt, seed):
        self.asked.append((self.variant.name, prompt, seed))
        return {"token_ids": [5], "text": f"said {len(self.asked)}"}

    def state(self):
        return {}

    def restore(self, state):
        pass


def stubbed(first, names, **options):
    """A runner whose decoders only note the order in which they were asked."""
    asked = []
    run = {"max_new_tokens": 4, "rounds": 1, "seed": 0, "raw": False} | options
    running = Runner(first, [Variant(names[0])], **run)
    running.decoders = {n: Stub(Variant(n), asked) for n in names}
    return running, asked


def firsts(running, asked, questions):
    """By kind: which decoder came first on each question, in each round."""
    found = {}
    for index, question in enumerate(questions):
        begin = len(asked)
        running.answer(question, index)
        every = [name for name, *_ in asked[begin :: len(running.decoders)]]
        found.setdefault(question.kind, []).append(every)
        assert Counter(name for name, *_ in asked[begin:]) == dict.fromkeys(
            running.decoders, len(every)
        )
    return found


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_every_decoder_comes_first_equally_often(bundled, rounds, monkeypatch):
    names = ["generate", "b", "c", "d"]
    kinds = [Question("s", str(i), f"kind {i % 4}", "", ("?",)) for i in range(64)]

    def even(running, asked):
        found = firsts(running, asked, kinds)
        every = [firsts for per_kind in found.values() for firsts in per_kind]
        equal = all(
            Counter(f[round_] for f in every) == dict.fromkeys(names, 16)
            for round_ in range(rounds)
        )
        mixed = all(len({f[0] for f in per_kind}) == 4 for per_kind in found.values())
        return equal and mixed

    assert even(*stubbed(bundled, names, rounds=rounds))
    control = stubbed(bundled, names, rounds=rounds)
    monkeypatch.setattr(Runner, "order", lambda self, index, moves: list(self.decoders))
    assert not even(*control)
    # control: moved on by one from round to round and question to question, the kinds are uneven
    monkeypatch.setattr(
        Runner, "order", lambda self, i, m: [*names, *names][(i + m) % 4 : (i + m) % 4 + 4]
    )
    assert not even(*stubbed(bundled, names, rounds=rounds))


def test_several_turns_go_on_from_the_baselines_answer(bundled):
    running, asked = stubbed(bundled, ["generate", "x", "y"], seed=3)
    question = Question("s", "1", "k", "k", ("One?", "Two?", "Three?"))
    running.answer(question, 0)
    said = {}
    for place, (name, prompt, seed) in enumerate(asked, start=1):
        number = (place - 1) // 3
        assert seed == runner.seed_of(3, "s/1", 0, number)
        turns = [question.turns[0]]
        for before in range(number):
            turns += [said["generate", before], question.turns[before + 1]]
        assert prompt == conversation(bundled, turns, raw=False)
        said[name, number] = f"said {place}"
    assert said["generate", 0] != said["x", 0]
    raw = bundled.tokenizer("One?\n\nsaid\n\nTwo?").input_ids
    assert conversation(bundled, ["One?", "said", "Two?"], raw=True) == raw


def test_a_conversation_that_grew_too_long_ends(bundled, monkeypatch):
    running, asked = stubbed(bundled, ["generate", "x"])
    room = bundled.target.max_context
    question = Question("s", "1", "k", "k", ("One?", "Two?", "Three?"))
    monkeypatch.setattr(
        Stub,
        "answer",
        lambda self, *_: asked.append(("", *_)) or {"token_ids": [5], "text": "word " * room},
    )
    found = running.answer(question, 0)
    assert {len(v["rounds"][0]["turns"]) for v in found["variants"].values()} == {1}
    assert len(asked) == 2


def test_the_warm_up_leaves_no_rows(bundled, monkeypatch):
    warmed = []
    real = Decoder.answer

    def answer(self, prompt, seed):
        warmed.append((self.variant.name, self.options["max_new_tokens"]))
        return real(self, prompt, seed)

    monkeypatch.setattr(Decoder, "answer", answer)
    records, running = decode(bundled, questions=QUESTIONS[:1], max_new_tokens=4)
    names = ["generate", *FIXED.split(",")]
    assert warmed[:4] == [(name, runner.WARM_UP_TOKENS) for name in names]
    assert sorted(warmed[4:]) == sorted((name, 4) for name in names)
    assert rows_before(records, "paper:nodes=8") == [0]
    assert rows_before(records, "adaptive:nodes=8") == [0]
    assert running.decoders["paper:nodes=8"].recycler.matrix.rows_seen > 0
    forget_nothing(monkeypatch)  # control
    records, _ = decode(bundled, questions=QUESTIONS[:1], max_new_tokens=4)
    assert rows_before(records, "paper:nodes=8") > [0]


@pytest.mark.slow
def test_rounds_do_the_same_work(bundled, monkeypatch):
    name = "paper:nodes=8"
    single, _ = decode(bundled, name, QUESTIONS[:3])
    thrice, _ = decode(bundled, name, QUESTIONS[:3], rounds=3)
    for round_ in range(3):
        assert lengths(thrice, name, round_) == lengths(single, name)
    assert rows_before(thrice, name) == rows_before(single, name)
    assert max(n for q in lengths(single, name) for t in q for n in t) > 1
    forget_nothing(monkeypatch)  # control: a second round knows the answers
    twice, _ = decode(bundled, name, QUESTIONS[:3], rounds=2)
    assert lengths(twice, name, 1) != lengths(twice, name, 0)


@pytest.mark.slow
def test_no_decoder_learns_from_another(bundled, monkeypatch):
    name = "paper:nodes=8"
    alone, _ = decode(bundled, name, QUESTIONS[:3])
    bundled.reset()
    several = f"generate-pld,auto,{name},none,prompt-lookup"
    among, running = decode(bundled, several, QUESTIONS[:3])
    assert lengths(among, name) == lengths(alone, name)
    assert rows_before(among, name) == rows_before(alone, name)
    recyclers = {n: d.recycler for n, d in running.decoders.items() if d.variant.drafter}
    assert len({r.matrix.candidates.data_ptr() for r in recyclers.values()}) == 4
    assert bundled.matrix.rows_seen == 0
    assert recyclers["none"].matrix.rows_seen == recyclers["prompt-lookup"].matrix.rows_seen == 0
    assert rows_before(among, "generate") == [0] * 3
    # control: with one matrix for two they do
    real = Decoder.__init__

    def shared(self, variant, first, *rest):
        real(self, variant, first, *rest)
        if self.variant.drafter == "paper":
            self.recycler.drafter.matrix = self.recycler.matrix = first.matrix

    monkeypatch.setattr(Decoder, "__init__", shared)
    among, _ = decode(bundled, f"paper:nodes=16,{name}", QUESTIONS[:3])
    bundled.reset()
    assert lengths(among, name) != lengths(alone, name)


def test_cold_begins_every_question_without_rows(bundled):
    name, cats = "paper:nodes=8", [QUESTIONS[0], QUESTIONS[4], QUESTIONS[0]]
    records, _ = decode(bundled, f"{name},none", cats)
    hot = rows_before(records, name)
    assert hot[0] == 0 < hot[1]
    assert hot == sorted(hot)
    cold, _ = decode(bundled, f"{name}:cold=yes", cats, rounds=2)
    assert rows_before(cold, f"{name}:cold=yes") == [0] * 3
    assert lengths(cold, f"{name}:cold=yes") != lengths(records, name)


@pytest.mark.slow
def test_samples_are_those_of_generate_at_the_same_temperature(bundled, monkeypatch):
    options = dict(decoders="prompt-lookup,auto", questions=QUESTIONS[1:2], max_new_tokens=10)

    def texts(**more):
        (record,), _ = decode(bundled, **options, seed=5, **more)
        turns = {name: row["rounds"][0]["turns"] for name, row in record["variants"].items()}
        flags = {name: all(each["identical"] for each in both) for name, both in turns.items()}
        return {name: [each["text"] for each in both] for name, both in turns.items()}, flags

    greedy, identical = texts()
    assert all(identical.values())
    sampled, identical = texts(temperature=0.8)
    assert all(identical.values())
    assert sampled["auto"] == sampled["generate"] != greedy["generate"]
    real = Decoder.answer  # control: another draw is another text
    monkeypatch.setattr(
        Decoder,
        "answer",
        lambda self, prompt, seed: real(self, prompt, seed + bool(self.variant.drafter)),
    )
    flags = {"generate": True, "prompt-lookup": False, "auto": False}
    assert texts(temperature=0.8)[1] == flags


def test_the_times_cover_the_whole_call(bundled):
    decoders = "generate-pld,prompt-lookup,paper:nodes=8"
    records, _ = decode(bundled, decoders, QUESTIONS[:3], max_new_tokens=20)
    for found in records:
        for name, row in found["variants"].items():
            for each in row["rounds"][0]["turns"]:
                assert 0 < each["first_seconds"] < each["seconds"]
                assert sum(each["phases"].values()) < each["seconds"] - each["first_seconds"]
                emitted = sum(each["accept_lengths"])
                first = each["token_ids"][: len(each["token_ids"]) - emitted]
                assert len(first) == 1 or ("pld" in name and first)  # of the prompt's forward
                assert len(each["step_seconds"]) == len(each["accept_lengths"])
                assert 0 < sum(each["step_seconds"]) <= each["seconds"] - each["first_seconds"]
                assert len(each["sizes"]) == len(each["accept_lengths"]) or "pld" in name
                assert each["identical"]
    pld = lengths(records, "generate-pld")
    assert max(n for q in pld for t in q for n in t) > 1
    assert measures.measure(records, "generate-pld")["size"] is None


def test_questions_that_do_not_fit_are_left_out(bundled):
    room = bundled.target.max_context
    whole = len(conversation(bundled, ["One?"], False))
    fits = Question("s", "fits", "k", "k", ("One?",))
    turns = Question("s", "turns", "k", "k", ("One?", "One?"))
    long = Question("s", "long", "k", "k", ("word " * room,))
    assert fitting(bundled, [fits, turns, long], room - whole, False) == ([fits], [turns, long])
    assert fitting(bundled, [fits], room - whole + 1, False) == ([], [fits])
    assert fitting(bundled, [turns], room // 2 - whole, False) == ([turns], [])


# Runs


def still(path):
    """A record or a line without what changes from run to run."""
    moving = {"seconds", "first_seconds", "step_seconds", "phases", "time", "peak_memory_bytes",
              "wall_time", "first_token_time", "tstamp", "command"}  # fmt: skip

    def strip(value):
        if isinstance(value, dict):
            return {key: strip(part) for key, part in value.items() if key not in moving}
        return [strip(part) for part in value] if isinstance(value, list) else value

    return [strip(json.loads(line)) for line in path.read_text().splitlines()]


FIGURES = ("questions", "tokens", "forwards", "mat", "accepted_per_depth", "size", "identical")


def contents(folder):
    """Everything in a run's folder that does not depend on time."""
    summary = json.loads((folder / "summary.json").read_text())
    text = (folder / "tables.md").read_text()
    return {
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
        "answers": {path.name: still(path) for path in (folder / "answers").iterdir()},
        "questions": still(folder / "questions.jsonl"),
        "summary": {
            name: (
                entry["about"],
                entry["matrix_bytes"],
                [[m[key] for key in FIGURES] for m in (entry["overall"], *entry["kinds"].values())],
            )
            for name, entry in summary["decoders"].items()
        },
        "about": [summary[key] for key in ("questions", "left_out", "kinds", "settings", "model")],
        "tables": [line.split(" | ")[0] for line in text.splitlines() if line.startswith("|")],
        "report": "</html>" in (folder / "report.html").read_text(),
    }


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_suite(tmp_path_factory.mktemp("suite") / "own.jsonl", QUESTIONS)


@pytest.fixture(scope="module")
def finished(suite, tmp_path_factory):
    """The folder of a run that nothing disturbed, and what it printed."""
    folder = tmp_path_factory.mktemp("bench") / "finished"
    code, out, err = call(*bench_of(suite, folder, "-n", 20, "--decoders", FIXED))
    assert code == 0, err
    assert "report: " in err
    return folder, out


def test_a_run_writes_its_files_and_prints_its_tables(finished, suite):
    folder, out = finished
    found = contents(folder)
    assert found["files"] == sorted(
        ["answers", "answers/adaptive_nodes=8.jsonl", "answers/generate.jsonl",
         "answers/paper_nodes=8.jsonl",
         "answers/prompt-lookup.jsonl", "figures.csv", "questions.jsonl", "report.html",
         "summary.json", "tables.md"]
    )  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["decoders"]) == ["generate", *FIXED.split(",")]
    assert [q["name"] for q in summary["questions"]] == [
        "own/1", "own/2", "own/3", "own/4", "own/5",
    ]  # fmt: skip
    assert summary["kinds"] == ["math", "story"]
    for name, entry in summary["decoders"].items():
        speedup = f"{entry['overall']['speedup']:.2f}x"
        assert any(line.split()[:1] == [name] and speedup in line for line in out.splitlines())
        assert speedup in (folder / "tables.md").read_text()
        assert entry["overall"]["identical"] == 1
        kept = still(folder / "answers" / answers.file_names([name])[name])
        assert [line["question_id"] for line in kept] == [1, 2, 3, 4, 5]
    assert summary["decoders"]["paper:nodes=8"]["about"]["size"] == 9
    assert summary["decoders"]["paper:nodes=8"]["matrix_bytes"] == 4096 * 8 * 6


def spec_bench_speed(path, base):
    """Spec-Bench's speed.py in a few lines; the baseline's tokens are counted, not read again."""

    def speeds(file):
        rows = [json.loads(line)["choices"][0] for line in file.read_text().splitlines()]
        return rows, [sum(row["new_tokens"]) / sum(row["wall_time"]) for row in rows]

    (rows, own), (_, plain) = speeds(path), speeds(base)
    accepted = [n for row in rows for n in row["accept_lengths"]]
    return fmean(own), fmean(own) / fmean(plain), fmean(accepted)  # fmt: skip


def test_spec_benchs_own_script_agrees(finished, tmp_path):
    folder, _ = finished
    summary = json.loads((folder / "summary.json").read_text())
    base = folder / "answers" / "generate.jsonl"
    for name, entry in summary["decoders"].items():
        path = folder / "answers" / answers.file_names([name])[name]
        expected = list(entry["spec_bench"].values())
        assert spec_bench_speed(path, base) == pytest.approx(expected, rel=1e-9)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        # control: the same times on other questions
        times = [line["choices"][0]["wall_time"] for line in lines]
        for line, moved in zip(lines, times[1:] + times[:1]):
            line["choices"][0]["wall_time"] = moved
        (tmp_path / "moved").write_text("\n".join(map(json.dumps, lines)))
        assert spec_bench_speed(tmp_path / "moved", base)[0] != pytest.approx(expected[0], rel=1e-4)


def test_a_second_run_gives_the_same_but_for_times(finished, suite, tmp_path):
    again = tmp_path / "again"
    assert call(*bench_of(suite, again, "-n", 20, "--decoders", FIXED))[0] == 0
    assert contents(again) == contents(finished[0])


def interrupted_at(monkeypatch, index, error=KeyboardInterrupt):
    """Let the run end in the middle of question ``index``, after its answers were learnt from."""
    real = Runner.answer

    def answer(self, question, number):
        record = real(self, question, number)
        if number == index:
            raise error
        return record

    monkeypatch.setattr(Runner, "answer", answer)


def test_a_run_that_is_interrupted_reports_what_it_has(suite, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    interrupted_at(monkeypatch, 2)
    code, out, err = call(*bench_of(suite, folder, "-n", 4, "--decoders", "none"))
    assert code == 130
    assert "interrupted: 2 of 5 questions have been answered" in err
    summary = json.loads((folder / "summary.json").read_text())
    assert [question["name"] for question in summary["questions"]] == ["own/1", "own/2"]
    assert summary["decoders"]["none"]["overall"]["questions"] == 2
    assert "none" in out
    for name in ("tables.md", "report.html"):
        assert "interrupted after 2 of 5 questions" in (folder / name).read_text()
    assert {line["asked"] for line in still(folder / "questions.jsonl")} == {5}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_the_same_command_continues_a_run(finished, suite, tmp_path, monkeypatch, error):
    """With the matrices as they were: it gives the figures of a run that nothing disturbed."""
    folder = tmp_path / "run"
    command = bench_of(suite, folder, "-n", 20, "--decoders", FIXED)
    with monkeypatch.context() as patch:
        interrupted_at(patch, 2, error)
        if error is KeyboardInterrupt:
            assert call(*command)[0] == 130
        else:  # as if it were killed; the state is that after the first question
            with pytest.raises(MemoryError):
                call(*command)
    code, _, err = call(*bench_of(suite, folder, "-n", 21, "--decoders", FIXED))
    assert code == 2
    assert "holds an interrupted run with settings: max_new_tokens 20, not 21" in err
    code, _, err = call(*command)
    assert code == 0, err
    answered = 2 if error is KeyboardInterrupt else 1
    assert f"continuing after {answered} of 5 questions" in err
    assert contents(folder) == contents(finished[0])
    assert call(*command)[0] == 2  # it is complete


def test_a_continued_run_needs_the_matrices(finished, suite, tmp_path, monkeypatch):
    """The negative control: without what was learnt, other figures come out."""
    folder = tmp_path / "run"
    command = bench_of(suite, folder, "-n", 20, "--decoders", FIXED)
    with monkeypatch.context() as patch:
        interrupted_at(patch, 2)
        assert call(*command)[0] == 130
    forget_nothing(monkeypatch)
    assert call(*command)[0] == 0
    assert contents(folder) != contents(finished[0])


def test_a_damaged_state_is_refused(suite, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    command = bench_of(suite, folder, "-n", 4, "--decoders", "paper:nodes=4")
    with monkeypatch.context() as patch:
        interrupted_at(patch, 2)
        assert call(*command)[0] == 130
    (folder / "questions.jsonl").write_text("{}\n")
    code, _, err = call(*command)
    assert (code, err.count("\n")) == (2, 1)
    assert "questions.jsonl is too short" in err
    (folder / "state.safetensors").write_text("nothing")
    code, _, err = call(*command)
    assert (code, err.count("\n")) == (2, 1)
    assert f"cannot continue {folder}" in err


def test_the_figures_as_a_table(finished):
    folder, _ = finished
    with (folder / "figures.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 5 * 4
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    for name, entry in summary["decoders"].items():
        rows = [row for row in table if row["decoder"] == name]
        assert sum(int(row["forwards"]) for row in rows) == entry["overall"]["forwards"]
        assert sum(int(row["tokens"]) for row in rows) == entry["overall"]["tokens"]
        speeds = median(float(row["speedup"]) for row in rows)
        assert speeds == pytest.approx(entry["overall"]["speedup"])
        for row, line in zip(rows, lines):
            turns = line["variants"][name]["rounds"][0]["turns"]
            ids = [list(map(int, part.split())) for part in row["token_ids"].split("|")]
            assert ids == [each["token_ids"] for each in turns]
            assert row["seeds"].split() == [str(each["seed"]) for each in turns]
    assert {row["nodes"] for row in table if row["drafter"] == "paper"} == {"8"}
    for row in [*table, *lines]:
        assert len(row["checksum"]) == 16
        assert "torch==" in row["versions"]
        assert row["command"] == summary["machine"]["command"]


def test_two_runs_are_compared_question_by_question(finished, suite, tmp_path):
    other = tmp_path / "other"
    assert call(*bench_of(suite, other, "-n", 20, "--decoders", "adaptive:nodes=8,none"))[0] == 0
    code, out, err = call("bench", "compare", finished[0], other, "--json")
    assert code == 0, err
    found = {one["first"]: one for one in json.loads(out)}
    assert list(found) == ["generate", "adaptive:nodes=8"]
    for one in found.values():
        assert one["questions"] == 5
        assert one["identical"] == 1
        assert one["forwards"] == {"median": 1.0, "interval": [1.0, 1.0]}
        low, high = one["speed"]["interval"]
        assert low <= one["speed"]["median"] <= high
    names = "none,adaptive:nodes=8"
    code, out, err = call("bench", "compare", other, finished[0], "--decoders", names)
    assert code == 0, err
    assert "none, adaptive:nodes=8" in out
    table = [json.loads(line) for line in (other / "questions.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (finished[0] / "questions.jsonl").open()]
    by_hand = median(
        len(measures.accept_lengths(measures.turns(one, "adaptive:nodes=8", 0)))
        / len(measures.accept_lengths(measures.turns(two, "none", 0)))
        for one, two in zip(records, table)
    )
    (one,) = json.loads(
        call("bench", "compare", other, finished[0], "--decoders", names, "--json")[1]
    )
    assert one["forwards"]["median"] == pytest.approx(by_hand)
    assert one["forwards"]["median"] < 1


@pytest.mark.parametrize(
    "more, message",
    [
        (["--decoders", "none"], "give two names"),
        (["--decoders", "none,generate"], "has no none; it has generate"),
    ],
)
def test_comparisons_that_cannot_be_made(finished, tmp_path, more, message):
    code, _, err = call("bench", "compare", finished[0], finished[0], *more)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    code, _, err = call("bench", "compare", finished[0], tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "is no folder of a benchmark" in err


@pytest.mark.slow
def test_rounds_sample_with_seeds_of_their_own(bundled):
    records, _ = decode(
        bundled, "auto", QUESTIONS[:2], rounds=3, temperature=1.0, top_p=0.9, max_new_tokens=16
    )
    seeds, texts = set(), set()
    for found in records:
        for round_ in range(3):
            plain, auto = (measures.turns(found, n, round_) for n in ("generate", "auto"))
            assert [t["seed"] for t in plain] == [t["seed"] for t in auto]
            assert [t["token_ids"] for t in plain] == [t["token_ids"] for t in auto]
            seeds |= {t["seed"] for t in plain}
            texts |= {t["text"] for t in plain}
    assert len(seeds) == 9  # the second question has two turns
    assert len(texts) > 6


def test_a_folder_with_other_files_is_refused(finished, suite):
    before = {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()}
    code, _, err = call(*bench_of(suite, finished[0], "-n", 20, "--decoders", FIXED))
    assert code == 2
    assert err.count("\n") == 1
    assert "is not empty; choose a new folder" in err
    assert {path: path.read_bytes() for path in finished[0].rglob("*") if path.is_file()} == before


# Other models


def all_figures(records, running):
    """The summary, which must be JSON that any reader takes."""
    about = {"date": "", "machine": {}, "model": {}, "settings": {}, "questions": []}
    found = summarise(records, running.decoders, about=about)
    json.dumps(found, allow_nan=False)
    return found


def test_answers_of_one_token(bundled, monkeypatch):
    every = list(range(bundled.target.vocab_size))
    monkeypatch.setattr(bundled.model.generation_config, "eos_token_id", every)
    records, running = decode(bundled, ",".join(DEFAULT), max_new_tokens=8)
    figures = all_figures(records, running)
    for entry in figures["decoders"].values():
        assert entry["overall"]["tokens"] == 6
        assert entry["overall"]["mat"] == 1.0
        assert entry["overall"]["identical"] == 1.0


def test_one_question_one_decoder_two_tokens(bundled):
    records, running = decode(bundled, "generate", questions=QUESTIONS[:1], max_new_tokens=2)
    figures = all_figures(records, running)
    assert list(figures["decoders"]) == ["generate"]
    assert figures["sample"] is None
    assert figures["losing"] == []
    assert tables.by_kind(figures) == (["kind", "questions"], [["math", "1"]])


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_without_a_chat_template(suite, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))
    tokenizer.chat_template = None
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, initializer_range=0.4,
            eos_token_id=None,
        )
    )  # fmt: skip
    folder = save(model, tokenizer, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    recycler = TokenRecycling.from_pretrained(folder, device="cpu")
    assert recycler.tokenizer.chat_template is None
    assert conversation(recycler, ["a", "b"], raw=False) == tokenizer("a\n\nb").input_ids
    long = Question("own", "6", "long", "long", ("word " * 80,))
    bench = bench_of(
        write_suite(tmp_path / "own.jsonl", [*QUESTIONS, long]), tmp_path / "out", "-n", 20,
        "--decoders", "generate-pld,auto", "-m", folder,
    )  # fmt: skip
    code, _, err = call(*bench)
    assert code == 0, err
    assert "do not fit into the context: 1" in err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["left_out"][0] == "own/6"
    assert "own/6" in (tmp_path / "out" / "report.html").read_text()
    assert len(summary["questions"]) == 5
    assert summary["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert all(entry["overall"]["identical"] == 1 for entry in summary["decoders"].values())


@pytest.mark.parametrize("name", ["bloom", "mamba"])
@pytest.mark.filterwarnings("ignore:.*does not support tree attention")
def test_models_that_are_decoded_plainly(name, tmp_path):
    model = make(name).eval()
    if name == "mamba":  # without a limit, and with a state that no draft can be taken back from
        assert TokenRecycling(model, letters()).target.max_context is None
    first = TokenRecycling(model, letters())
    questions = [
        Question("own", str(i), "k", "k", turns)
        for i, turns in enumerate([("abe,bi. ",), ("fo", "da")])
    ]
    records, running = decode(first, "none,paper:nodes=4,auto", questions=questions)
    figures = all_figures(records, running)
    assert all(entry["overall"]["identical"] == 1 for entry in figures["decoders"].values())
    assert figures["decoders"]["auto"]["overall"]["mat"] == 1
    if name == "mamba":
        with pytest.raises(TokenRecyclingError, match="generate-pld fails with this model: ass"):
            decode(first, "generate-pld", questions=questions)


def test_a_short_context_and_words_that_the_tokenizer_does_not_know():
    first = TokenRecycling(make("llama", max_position_embeddings=40).eval(), letters())
    texts = ("abe", "QQQ", "fo")
    questions = [Question("own", str(i), "k", "k", (text,)) for i, text in enumerate(texts)]
    fits, others = fitting(first, questions, 4, raw=True)
    assert [q.turns[0] for q in fits] == ["abe", "fo"]
    assert [q.turns[0] for q in others] == ["QQQ"]
    assert len(first.tokenizer(runner.DEMO[0]).input_ids) > 40 == first.target.max_context
    records, running = decode(
        first, "auto,generate-pld", questions=fits, raw=True, max_new_tokens=4
    )
    assert all_figures(records, running)["decoders"]["auto"]["overall"]["identical"] == 1


# The command line


def test_names_with_brackets_and_strokes(tmp_path):
    odd = [
        Question("own", "1", "[/b]", "", ("How many?",)),
        Question("own", "2", "a|b", "", ("Why?",)),
    ]
    (tmp_path / "[red]$.json").write_text("[[0], [1]]")
    decoder = f"paper:tree={tmp_path / '[red]$.json'}"
    out = tmp_path / "out"
    bench = bench_of(write_suite(tmp_path / "own.jsonl", odd), out, "-n", 2, "--decoders", decoder)
    code, printed, err = call(*bench, "--rounds", 3)
    assert code == 0, err
    assert "[/b]" in printed
    assert "[red]$.json" in printed
    assert "| a\\|b |" in (out / "tables.md").read_text()
    assert len(list((out / "answers").iterdir())) == 2
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["decoders"][decoder]["rounds"]) == 3


def wrong_calls(folder):
    (folder / "high.json").write_text("[[9]]")
    (folder / "broken.jsonl").write_text("{")
    return [
        (["--decoders", "oracle"], "oracle"),
        (["--decoders", "paper:tree=no-tree"], "no-tree"),
        (["--decoders", f"paper:tree={folder / 'high.json'}"], "it needs k="),
        (["--rounds", 0], "--rounds"),
        (["-n", 1], "-n is 1"),
        (["--per-kind", 0], "per kind"),
        (["--temp", "nan"], "nan"),
        (["--temp", "inf"], "inf"),
        (["--temp", -1], "-1"),
        (["--seed", -1, "--temp", 1], "--seed is -1"),
        (["--top-p", 0.9], "--top-p needs --temp above 0"),
        (["--top-p", 0, "--temp", 1], "--top-p is 0"),
        (["--suite", folder / "broken.jsonl"], "broken.jsonl, line 1"),
        (["--suite", folder / "none.jsonl"], "none.jsonl"),
        (["-m", folder / "nowhere"], "nowhere"),
        (["--device", "warp"], "warp"),
        (["--threads", 0], "--threads"),
        (["-n", 5000], "no question fits"),
        (["-o", folder], "is not empty"),
        (["-o", folder / "high.json"], "high.json"),
    ]


@pytest.mark.parametrize("index", range(20))
def test_wrong_input_is_one_line_and_exit_code_2(index, tmp_path):
    (tmp_path / "files").mkdir()
    calls = wrong_calls(tmp_path / "files")
    assert len(calls) == 20
    arguments, named = calls[index]
    suite = (
        []
        if "broken" in named or "none" in named
        else [write_suite(tmp_path / "own.jsonl", QUESTIONS)]
    )
    before = sorted(tmp_path.rglob("*"))
    given = ["--suite", *suite] if suite else []
    code, out, err = call("bench", "-o", tmp_path / "out", *given, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err
    assert sorted(tmp_path.rglob("*")) == before

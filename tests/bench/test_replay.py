"""Drafters on recorded answers: by hand, by another implementation, and whatever the answer is."""

import json
import random
from collections.abc import Sequence

import pytest
import torch

from architectures import make
from command import call, write_suite
from letters import letters
from models import TREES, random_prompts
from token_recycling import AdjacencyMatrix, TokenRecycling, TokenRecyclingError
from token_recycling.accept import GreedyAcceptor
from token_recycling.bench import replay as replaying
from token_recycling.bench.replay import NoModel, figures, read_answers, replay
from token_recycling.bench.suites import Question
from token_recycling.draft_size.base import FixedSize
from token_recycling.draft_size.costs import CostCurve
from token_recycling.drafters import PaperDrafter, PromptLookupDrafter
from token_recycling.metrics import Step
from token_recycling.tree import TreeTemplate
from toy import ToyTarget

MODEL = NoModel(50)


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def emitted(steps):
    return [step.tokens[0] for step in steps]


def joined(steps):
    return [token for tokens in emitted(steps) for token in tokens]


# Without a model


def by_lookup(prompt, answer):
    return replay(MODEL, PromptLookupDrafter(), FixedSize(), prompt, answer)


def test_prompt_lookup_on_a_text_that_repeats_by_hand():
    steps = by_lookup([5, 6, 7, 8], [5, 6, 7, 8, 5, 6, 7, 8])
    # The prompt's reading yields 5. Behind "5 6 7 8 5" the last 5 was followed by 6 7 8 5: right,
    # and one more. Behind "… 8 5 6" the last 8 5 6 was followed by 7 8 5 6: the text ends in it.
    assert emitted(steps) == [[6, 7, 8, 5, 6], [7, 8]]
    assert [step.drafted for step in steps] == [[4], [4]]
    assert [step.nodes for step in steps] == [5, 5]
    found = figures([steps], [4], None)
    assert (found.mat, found.tokens, found.steps, found.answers) == (3.5, 7, 2, 1)
    assert found.accepted_per_depth == [1.0, 0.5, 0.5, 0.5]
    assert found.nodes == 5
    assert found.expected_speedup is None
    # control: nothing repeats
    steps = by_lookup([1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12])
    assert figures([steps], [4], None).mat == 1.0


def looked_up(context, length=10, most=3):
    """Prompt lookup in a few lines: what followed the latest of the longest matches."""
    for n in range(min(most, len(context) - 1), 0, -1):
        for at in range(len(context) - 1, n - 1, -1):
            if context[at - n : at] == context[-n:]:
                return context[at : at + length]
    return []


def looked_up_steps(prompt, answer, **options):
    context, done, steps = [*prompt, answer[0]], 1, []
    while done < len(answer):
        draft = looked_up(context, **options)
        right = 0
        while right < len(draft) and answer[done + right : done + right + 1] == [draft[right]]:
            right += 1
        new = answer[done : done + right + 1]
        steps.append((new, len(draft)))
        context += new
        done += len(new)
    return steps


def test_prompt_lookup_is_that_of_another_implementation():
    others = {"length": 0, "most": 0}
    for seed in range(20):
        rng = random.Random(seed)
        words = [[rng.randrange(8) for _ in range(rng.randrange(1, 6))] for _ in range(4)]
        prompt = [token for _ in range(4) for token in rng.choice(words)]
        answer = [token for _ in range(10) for token in rng.choice(words)]
        steps = by_lookup(prompt, answer)
        found = [(step.tokens[0], step.drafted[0]) for step in steps]
        assert found == looked_up_steps(prompt, answer)
        for option in others:  # control: with another length or another n-gram
            others[option] += found != looked_up_steps(prompt, answer, **{option: 1})
    assert min(others.values()) > 10


def test_a_drafter_of_logits_needs_a_model():
    drafter = PaperDrafter(AdjacencyMatrix(50, 2), TreeTemplate.chain(2))
    with pytest.raises(TokenRecyclingError, match="paper needs a model's logits"):
        replay(MODEL, drafter, FixedSize(), [1], [2, 3])


def test_short_answers():
    assert by_lookup([1], [2]) == []
    with pytest.raises(TokenRecyclingError, match="the answer is empty"):
        by_lookup([1], [])
    with pytest.raises(TokenRecyclingError, match="no answer has two tokens"):
        figures([[]], [1], None)


# With a model


def recycled_by_hand(target, prompt, answer, k, paths):
    """The paper's drafter on a forced answer, with a dict for a matrix; return what steps emit."""
    best = lambda context: target.logits(context).topk(k).indices.tolist()  # noqa: E731
    rows = {token: best(prompt[: i + 1]) for i, token in enumerate(prompt)}
    context, done, steps = list(prompt), 1, []
    context.append(answer[0])
    while done < len(answer):
        tree = {(): context[-1]}
        for path in paths:
            above = tree.get(path[:-1])
            if above in rows:
                tree[path] = rows[above][path[-1]]
        right: Sequence[int] = ()
        for path in tree:
            tokens = [tree[path[: i + 1]] for i in range(len(path))]
            if tokens == answer[done : done + len(path)] and len(path) > len(right):
                right = path
        for path in tree:  # the rows of the tree as it was drafted; the last one stays
            tokens = [tree[path[: i + 1]] for i in range(len(path))]
            rows[tree[path]] = best(context + tokens)
        new = answer[done : done + len(right) + 1]
        steps.append((new, len(tree) - 1))
        context += new
        done += len(new)
    return steps


@pytest.mark.parametrize("tree", ["chain-1", "chain-3", "ranked-8", "ranked-16"])
@pytest.mark.parametrize("seed", range(3))
def test_the_papers_drafter_by_hand(tree, seed):
    target, rng = ToyTarget(), random.Random(seed)
    template = TreeTemplate.load(tree, 3)
    prompt = [rng.randrange(12) for _ in range(6)]
    answer = [rng.randrange(12) for _ in range(40)]
    drafter = PaperDrafter(AdjacencyMatrix(12, 3), template)
    steps = replay(target, drafter, FixedSize(), prompt, answer)
    found = [(step.tokens[0], step.drafted[0]) for step in steps]
    assert found == recycled_by_hand(ToyTarget(), prompt, answer, 3, template.paths)
    other = TreeTemplate.load("chain-2", 3)  # control
    assert found != recycled_by_hand(ToyTarget(), prompt, answer, 3, other.paths)


@pytest.fixture(scope="module")
def tiny():
    return make("llama").eval()


def opened(model, drafter, tree):
    return TokenRecycling(model, letters(), drafter=drafter, tree=tree)


def replayed(recycler, prompt, answer):
    return replay(recycler.target, recycler.drafter, recycler.draft_size, prompt, answer)


@pytest.mark.parametrize(
    "drafter,tree",
    [*(("paper", tree) for tree in TREES), ("prompt-lookup", "auto"), ("prompt-lookup", "paper"),
     ("none", "paper")],
)  # fmt: skip
def test_exactly_the_recorded_answer_comes_out(drafter, tree, tiny):
    recycler = opened(tiny, drafter, tree)
    own = recycler.generate(random_prompts([12])[0], max_new_tokens=40).token_ids
    for prompt, wrong in zip(random_prompts([12, 1]), random_prompts([30, 40], seed=2)):
        for answer in (wrong, [*wrong[:5], *own], [7] * 20, [2, 2]):
            steps = replayed(recycler, prompt, answer)
            assert [answer[0], *joined(steps)] == answer
            assert steps[-1].reasons == ["length"]
    assert bool(recycler.matrix.rows_seen) == (drafter == "paper")


def test_the_models_own_answer_would_not(tiny, monkeypatch):
    recycler = opened(tiny, "paper", "ranked-8")
    prompt, answer = random_prompts([12])[0], random_prompts([20], seed=2)[0]
    monkeypatch.setattr(replaying, "ForcedAcceptor", lambda answer, device: GreedyAcceptor())
    steps = replayed(recycler, prompt, answer)
    assert joined(steps) != answer[1:]


def test_draft_only_is_teacher_forcing_step_for_step(bundled):
    encode = bundled.tokenizer
    prompt = encode("The cat sat on the mat. What did the cat do?").input_ids
    text = "The cat sat on the mat and the cat sat on the mat. " * 3
    answer = encode(text, add_special_tokens=False).input_ids

    def shown(target, drafter):
        steps = replay(target, drafter, FixedSize(), prompt, answer)
        return [(step.tokens, step.reasons, step.drafted, step.nodes) for step in steps]

    without = shown(NoModel(4096), PromptLookupDrafter())
    assert shown(bundled.target, PromptLookupDrafter()) == without
    assert shown(bundled.target, PromptLookupDrafter(length=3)) != without
    assert max(len(tokens[0]) for tokens, *_ in without) > 5


def test_what_does_not_fit_is_refused(tiny):
    recycler = opened(tiny, "none", "paper")
    room = recycler.target.max_context
    prompt, answer = random_prompts([room - 10, 11])
    steps = replayed(recycler, prompt, answer[:10])
    assert len(steps) == 9
    with pytest.raises(
        TokenRecyclingError, match=f"have {room + 1} tokens; the context holds {room}"
    ):
        replayed(recycler, prompt, answer)


def test_the_expected_speedup_by_hand():
    def step(tokens, nodes):
        return Step([[0] * tokens], [None], [nodes - 1], nodes, (0.1, 1.0, 1.0, 0.2, 1.0))

    # 1 + 0.1 per token verified, and 0.01 per token of context
    curve = CostCurve((1, 11), (0, 100), ((1.0, 2.0), (2.0, 3.0)))
    runs, contexts = [[step(3, 11), step(1, 1)], [step(2, 6)]], [10, 50]
    found = figures(runs, contexts, curve)
    plain = sum(1 + 0.01 * context for context in (10, 11, 12, 13, 50, 51))
    spent = (2 + 0.1) + (1 + 0.13) + (1.5 + 0.5)
    assert found.expected_speedup == pytest.approx(plain / spent)
    assert figures(runs, contexts[::-1], curve).expected_speedup != pytest.approx(plain / spent)
    assert (found.answers, found.tokens, found.steps, found.mat, found.nodes) == (2, 6, 3, 2, 6)
    assert found.accepted_per_depth == [2 / 3, 1 / 3]
    assert found.draft_seconds == pytest.approx(0.3)
    assumed = CostCurve.assumed("cpu")
    assert figures(runs, contexts, assumed).expected_speedup is None


# Recorded answers


def line(number, *turns, **more):
    return {"question_id": number, "choices": [{"turns": list(turns)}], **more}


def asked(*names):
    return [Question(*name.split("/"), "k", "k", ("a", "b")) for name in names]


@pytest.fixture
def recorded(tmp_path):
    def write(*rows):
        path = tmp_path / "answers.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return path

    return write


def answers_of(questions):
    return {question.name: question.answers for question in questions}


def test_answers_find_their_questions(recorded):
    path = recorded(line(1, "x", "y"), "", line("b", "z"), line(9, "none asked"))
    found = read_answers(path, asked("s/1", "s/2", "s/b"))
    assert answers_of(found) == {"s/1": ("x", "y"), "s/b": ("z",)}
    path = recorded(line(1, "x", suite="as it was called then"))
    assert answers_of(read_answers(path, asked("s/1"))) == {"s/1": ("x",)}


def test_answers_of_two_suites_are_distinguished(recorded):
    path = recorded(line(1, "x", suite="s"), line(1, "y", suite="t"))
    assert answers_of(read_answers(path, asked("s/1", "t/1"))) == {"s/1": ("x",), "t/1": ("y",)}
    with pytest.raises(TokenRecyclingError, match="no answers to these questions"):
        read_answers(path, asked("u/1"))


@pytest.mark.parametrize(
    "row,named",
    [
        ("{", "line 2: invalid JSON"),
        ("[" * 100_000, "line 2: invalid JSON"),
        ("5", "line 2: invalid answer"),
        ("[]", "line 2: invalid answer"),
        ({}, "line 2: invalid answer"),
        ({"question_id": 2}, "line 2: invalid answer"),
        ({"choices": [{"turns": ["x"]}]}, "line 2: invalid answer"),
        ({"question_id": 2, "choices": []}, "line 2: invalid answer"),
        ({"question_id": 2, "choices": {}}, "line 2: invalid answer"),
        ({"question_id": 2, "choices": [{}]}, "line 2: invalid answer"),
        ({"question_id": 2, "choices": [{"turns": "abc"}]}, "list of valid strings"),
        ({"question_id": 2, "choices": [{"turns": [None]}]}, "list of valid strings"),
        (line(2, "\ud83d"), "list of valid strings"),
    ],
)
def test_wrong_answers_are_named(row, named, recorded):
    with pytest.raises(TokenRecyclingError, match=named) as caught:
        read_answers(recorded(line(1, "x"), row), asked("s/1", "s/2"))
    assert "\n" not in str(caught.value)


def test_an_answer_file_that_is_none(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for name in ("nothing", "latin", "."):
        with pytest.raises(TokenRecyclingError, match="cannot read the answers"):
            read_answers(tmp_path / name, asked("s/1"))


# The command line


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    rows = [
        {"prompt": "Say it.", "answer": "the cat sat on the mat " * 4, "kind": "repeats"},
        {"turns": ["Say it.", "More."], "answer": ["one two three four", "one two"], "kind": "all"},
        {"prompt": "Say nothing.", "answer": "a", "kind": "short"},
        {"prompt": "Say too much.", "answer": "word " * 3000, "kind": "long"},
    ]
    path = tmp_path_factory.mktemp("replay") / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_the_command_with_and_without_a_model(suite):
    common = ("replay", "--suite", suite, "--threads", 1, "--json", "-n", 4000)
    code, out, err = call(*common, "--decoders", "prompt-lookup,none,paper@ranked-8,auto")
    assert code == 0, err
    assert "1 answers do not fit" in err
    found = json.loads(out)
    assert list(found) == ["prompt-lookup", "none", "paper@ranked-8", "auto"]
    assert all(list(kinds) == ["all", "repeats"] for kinds in found.values())
    assert {kinds["all"]["tokens"] for kinds in found.values()} == {found["none"]["all"]["steps"]}
    assert {kinds["all"]["answers"] for kinds in found.values()} == {3}
    assert found["prompt-lookup"]["repeats"]["mat"] > 2 > found["none"]["all"]["mat"] == 1
    code, out, err = call(*common, "--decoders", "prompt-lookup", "--draft-only", "-n", 256)
    assert code == 0, err
    # the long answer counts here, cut to 256 tokens
    alone = json.loads(out)["prompt-lookup"]
    same = ("mat", "tokens", "steps", "accepted_per_depth", "nodes")
    assert [alone["repeats"][key] for key in same] == [
        found["prompt-lookup"]["repeats"][key] for key in same
    ]
    code, out, _ = call(*common[:-3], "--decoders", "prompt-lookup", "--draft-only")
    rows = {row.split()[0]: row for row in out.splitlines()}
    assert rows["short"].split() == ["short", "–"]
    assert f"{alone['repeats']['mat']:.2f}" in rows["repeats"]


def test_the_answers_of_a_benchmark_are_replayed(tmp_path):
    """What the benchmark wrote goes back in, and is drafted as it was decoded."""
    texts = [f"How many legs have {i} cats?" for i in range(2)]
    questions = [Question("own", f"0{i}", "k", "k", (text,)) for i, text in enumerate(texts)]
    suite = write_suite(tmp_path / "own.jsonl", questions)
    bench = ("bench", "--suite", suite, "-n", 24, "--threads", 1, "--no-tune", "-o", tmp_path / "o")
    assert call(*bench, "--decoders", "prompt-lookup")[0] == 0
    lines = (tmp_path / "o" / "answers" / "prompt-lookup.jsonl").read_text().splitlines()
    lengths = [n for row in lines for n in json.loads(row)["choices"][0]["accept_lengths"]]
    answers = tmp_path / "o" / "answers" / "generate.jsonl"
    arguments = ("--answers", answers, "--decoders", "prompt-lookup", "--draft-only", "--json")
    code, out, err = call("replay", "--suite", suite, *arguments)
    assert code == 0, err
    found = json.loads(out)["prompt-lookup"]["all"]
    assert found["answers"] == 2
    assert found["mat"] == pytest.approx(sum(lengths) / len(lengths))


def wrong_calls(suite, folder):
    (folder / "answers.jsonl").write_text(json.dumps(line(7, "x")))
    (folder / "plain.jsonl").write_text('{"prompt": "a"}')
    (folder / "short.jsonl").write_text('{"prompt": "a", "answer": "a"}')
    own = ["--suite", suite]
    return [
        ([], "--suite"),
        (["--suite", folder / "none.jsonl"], "none.jsonl"),
        (["--suite", folder / "plain.jsonl"], "no recorded answers"),
        (["--suite", folder / "short.jsonl", "--draft-only", "--decoders", "none"], "two tokens"),
        ([*own, "-n", 1], "-n must be 2"),
        ([*own, "--decoders", ","], "name at least one decoder"),
        ([*own, "--decoders", "generate"], "generate has no drafter to replay"),
        ([*own, "--decoders", "oracle"], "oracle"),
        ([*own, "--decoders", "auto", "--draft-only"], "--draft-only"),
        ([*own, "--decoders", "paper@no-tree"], "no-tree"),
        ([*own, "--answers", folder / "answers.jsonl"], "no answers to these questions"),
        ([*own, "--answers", folder / "nowhere"], "nowhere"),
        ([*own, "--draft-only", "-m", folder], "cannot load the tokenizer"),
        ([*own, "-m", folder], "cannot load the model"),
        ([*own, "--per-kind", 0], "per kind"),
        ([*own, "--threads", 0], "--threads"),
    ]


@pytest.mark.parametrize("index", range(16))
def test_wrong_input_is_one_line_and_exit_code_2(index, suite, tmp_path):
    calls = wrong_calls(suite, tmp_path)
    assert len(calls) == 16
    arguments, named = calls[index]
    code, out, err = call("replay", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err

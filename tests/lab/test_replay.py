"""A replay of recorded answers takes the steps of live decoding, and the benchmark counts them."""

from __future__ import annotations

import pytest
import torch

from record import CANDIDATES, Watch, answered, write
from replay import Answers, mat
from token_recycling import TokenRecycling, TreeTemplate
from token_recycling.bench import measures
from token_recycling.bench.runner import Runner
from token_recycling.bench.suites import Question
from token_recycling.bench.variants import Variant, parse
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import Drafter
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.paper import PaperDrafter
from token_recycling.drafting.templates import TreeShape
from token_recycling.hf.call import CallOptions

QUESTIONS = [
    Question("own", str(i), "k", "k", (text,))
    for i, text in enumerate(
        ("Tell me a story of a fox.", "How many legs have 3 cats?", "The king had a red hat.")
    )
]
TOKENS = 48
K = 6


class Own(Drafter):
    """A drafter of another package: a chain of the best candidates, from a matrix of its own."""

    name = "own"

    def __init__(self, vocabulary):
        self.matrix = AdjacencyMatrix(vocabulary, K)
        self.shape = TreeShape(TreeTemplate.chain(5), "cpu")

    def prompt_mask(self, tokens):
        return torch.ones_like(tokens, dtype=torch.bool)

    def learn_prompt(self, tokens, candidates, mask):
        self.learn(tokens, candidates, mask & torch.from_numpy(candidates.finite))

    def learn(self, tokens, candidates, valid):
        self.matrix.update(tokens[0], candidates.ids[0], valid=valid[0])

    def propose(self, rows, roots, size=None):
        chain, valid = [roots], [torch.ones_like(roots, dtype=torch.bool)]
        for _ in range(5):
            best = self.matrix.candidates[chain[-1], 0].long()
            valid.append(valid[-1] & (best >= 0))
            chain.append(best.clamp(min=0))
        return self.shape.draft(torch.stack(chain, 1), torch.stack(valid, 1)).first(size)

    def observe(self, rows, draft, candidates, accepted):
        self.learn(draft.tokens, candidates, draft.valid)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Answers of the bundled model, with the candidates at the nodes that were drafted."""
    first = TokenRecycling.from_pretrained(device="cpu", k=CANDIDATES)
    watch = Watch(AdjacencyMatrix(first.target.vocab_size, CANDIDATES), 15)
    recycler = TokenRecycling(first.model, first.tokenizer, drafter=watch)
    options = CallOptions(max_new_tokens=TOKENS)
    recordings = [
        answered(recycler, watch, one, [{"role": "user", "content": one.turns[0]}], options)
        for one in QUESTIONS
    ]
    path = tmp_path_factory.mktemp("replay") / "answers.pt"
    write(path, recordings)
    answers = Answers(path, first)
    answers.exact = True
    return first, answers


def drafters(vocabulary):
    """By name: the drafter, its number of nodes, and the benchmark's name for it."""
    return {
        "paper": (
            PaperDrafter(AdjacencyMatrix(vocabulary, 8), TreeTemplate.load("paper", 8)),
            None,
        ),
        "adaptive:nodes=16": (AdaptiveDrafter(AdjacencyMatrix(vocabulary, 12), 16), 16),
        "own": (Own(vocabulary), None),
    }


class Notes:
    """A journal in memory."""

    def __init__(self):
        self.records, self.states = [], {}

    def add(self, record, states):
        self.records.append(record)


def live(first, name, monkeypatch):
    """Run the benchmark; return the records and the number of calls of ``verify``."""
    if name == "own":
        vocabulary = first.target.vocab_size
        variant = Variant("own", "own")
        own = TokenRecycling(first.model, first.tokenizer, drafter=Own(vocabulary))
        monkeypatch.setattr("token_recycling.bench.decoders._recycler", lambda *_: own)
    else:
        variant = parse(name)
    running = Runner(
        first, [Variant("generate"), variant], max_new_tokens=TOKENS, rounds=1, seed=0, raw=False
    )
    target, calls = running.decoders[name].recycler.target, []
    verify = target.verify
    monkeypatch.setattr(target, "verify", lambda draft: calls.append(draft.size) or verify(draft))
    notes = Notes()
    monkeypatch.setattr(Runner, "_warm_up", lambda self: None)
    running.run(QUESTIONS, notes, lambda done, total: None)
    return notes.records, calls


@pytest.mark.parametrize("name", ["paper", "adaptive:nodes=16", "own"])
def test_replay_and_benchmark_agree(recorded, name, monkeypatch):
    first, answers = recorded
    drafter, nodes = drafters(first.target.vocab_size)[name]
    replayed = [answers.replay(drafter, one, nodes) for one in answers.recordings]
    records, calls = live(first, name, monkeypatch)
    found = measures.measure(records, name)
    assert found["forwards"] == len(calls)
    sizes = [n for turn in measures.every_turn(records, name) for n in turn["sizes"]]
    assert sizes == calls
    assert found["mat"] == pytest.approx(mat(replayed), rel=0.01)
    assert found["mat"] > 1.2
    lengths = [one.lengths for one in replayed]
    by_question = [measures.accept_lengths(measures.turns(record, name, 0)) for record in records]
    if name != "adaptive:nodes=16":  # whose probabilities are rounded in a recording
        assert lengths == by_question


def test_another_reading_of_prompts_is_another_replay(recorded):
    """The negative control: a drafter that learns from no prompt takes other steps."""
    first, answers = recorded
    whole, nodes = drafters(first.target.vocab_size)["paper"]
    none, _ = drafters(first.target.vocab_size)["paper"]
    none.prompts = "none"
    results = [
        mat(answers.replay(drafter, one, nodes) for one in answers.recordings)
        for drafter in (whole, none)
    ]
    assert abs(results[0] / results[1] - 1) > 0.01

"""Drafters with the methods of the first contract: one warning, and the same text."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from architectures import make
from models import plain, random_prompts
from token_recycling import AdjacencyMatrix, DraftTree, TokenRecycling, TreeTemplate, drafters
from token_recycling.accept import GreedyAcceptor
from token_recycling.decode import Decoding
from token_recycling.draft_size.auto import AutoSize
from token_recycling.draft_size.base import FixedSize
from token_recycling.draft_size.costs import SIZES, CostCurve
from token_recycling.drafters import Drafter, PaperDrafter, make_drafter
from token_recycling.drafters.legacy import LegacyDrafter, adapted
from token_recycling.sequence import Sequence, at_most
from token_recycling.tree import chains, root_only
from toy import VOCABULARY, ToyTarget, next_logits, plain_greedy

LENGTH = 3
PROMPTS = [[3, 1, 4, 3], [1, 5, 9, 2]]


class Minimal(Drafter):
    """As little as most had: a name, and a chain of what last followed each token."""

    name = "minimal"

    def __init__(self):
        self.following = {}

    def propose(self, roots):
        columns = [roots]
        for _ in range(LENGTH):
            columns.append(torch.tensor([self.following.get(t, 0) for t in columns[-1].tolist()]))
        return chains(torch.stack(columns, dim=1))

    def observe(self, draft, logits, accepted):
        for row, emitted in enumerate(accepted.tokens):
            for before, token in zip([int(draft.tokens[row, 0]), *emitted], emitted):
                self.following[before] = token


class ProposeOnly(Drafter):
    """The one method that had no default."""

    name = "propose-only"

    def propose(self, roots):
        return chains(roots[:, None].repeat(1, LENGTH + 1))


class Everything(Minimal):
    """All methods of the first contract; it counts their calls."""

    name = "everything"
    needs_logits = True

    def __init__(self):
        super().__init__()
        self.calls = dict.fromkeys(("start", "wants", "prime", "rest", "propose", "observe"), 0)
        self.texts = []

    @property
    def shares(self):
        return tuple(0.9**depth for depth in range(1, LENGTH + 1))

    def start(self, prompts):
        self.calls["start"] += 1
        self.texts = [list(prompt) for prompt in prompts]

    def wants(self, tokens):
        self.calls["wants"] += 1
        return torch.ones_like(tokens, dtype=torch.bool)

    def prime(self, tokens, logits, valid):
        self.calls["prime"] += 1
        assert logits.shape[:2] == tokens.shape == valid.shape
        best = logits.argmax(dim=-1)
        for token, following in zip(tokens[valid].tolist(), best[valid].tolist()):
            self.following[token] = following

    def rest(self, roots):
        self.calls["rest"] += 1
        return root_only(roots)

    def propose(self, roots):
        self.calls["propose"] += 1
        return super().propose(roots)

    def observe(self, draft, logits, accepted):
        self.calls["observe"] += 1
        assert logits.shape[:2] == draft.tokens.shape
        super().observe(draft, logits, accepted)


def wrapped(drafter):
    """Adapt ``drafter``, and check that there is exactly one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = adapted(drafter)
    (warning,) = caught
    assert warning.category is DeprecationWarning
    message = str(warning.message)
    assert drafter.name in message
    assert "\n" not in message
    return found


def by_last(context):
    return next_logits(context[-1:])


def decoded(drafter, policy, prompts=PROMPTS, n=40):
    sequences = [Sequence(prompt, [at_most(n)]) for prompt in prompts]
    decoding = Decoding(ToyTarget(by_last), drafter, policy, GreedyAcceptor(), sequences)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none after the first
        steps = list(decoding.steps())
    assert [sequence.new_tokens for sequence in sequences] == [
        plain_greedy(prompt, n, by_last) for prompt in prompts
    ]
    return steps


@pytest.mark.parametrize("nodes", [None, 1, 2])
def test_the_text_is_that_of_plain_decoding(nodes):
    drafter = wrapped(Everything())
    assert isinstance(drafter, LegacyDrafter)
    steps = decoded(drafter, FixedSize(nodes))
    assert {step.nodes for step in steps[1:]} == {nodes or LENGTH + 1}
    if nodes != 1:
        assert max(len(tokens) for step in steps for tokens in step.tokens) > 1


def test_every_old_method_is_called():
    old = Everything()
    drafter = wrapped(old)
    assert (drafter.name, drafter.needs_logits, drafter.matrix) == ("everything", True, None)
    assert drafter.acceptance == old.shares
    assert not drafter.capturable
    steps = decoded(drafter, FixedSize())
    assert old.calls["start"] == 1
    assert old.calls["wants"] == old.calls["prime"] == len(PROMPTS)  # a chunk of the toy's each
    assert old.calls["propose"] == old.calls["observe"] == len(steps) - 1
    assert old.calls["rest"] == 0
    assert old.texts == PROMPTS
    old = Everything()
    steps = decoded(wrapped(old), FixedSize(1))
    assert old.calls["rest"] == old.calls["observe"] == len(steps) - 1
    assert old.calls["propose"] == 0


def test_what_is_missing_has_a_default():
    drafter = wrapped(Minimal())
    assert (drafter.needs_logits, drafter.matrix, drafter.acceptance) == (False, None, ())
    rows, tokens = drafter.new_rows(2), torch.tensor([[1, 2], [3, 4]])
    drafter.load(rows, tokens.tolist())
    assert drafter.prompt_mask(tokens) is None
    draft = drafter.propose(rows, tokens[:, 0], 1)
    assert isinstance(draft, DraftTree)
    assert draft.tokens.tolist() == [[1], [3]]
    assert drafter.sources(rows, draft) == ["minimal"]


def test_old_shares_let_the_size_follow_costs():
    """Expensive nodes: plain decoding; cheap ones: drafts, and both lossless."""
    sizes = {}
    for name, cost in {"cheap": 0.001, "expensive": 1.0}.items():
        drafter = wrapped(Everything())
        seconds = tuple(1.0 + cost * (n - 1) for n in SIZES)
        policy = AutoSize(drafter.acceptance, CostCurve(SIZES, (0,), (seconds,)))
        policy.begin([Sequence(prompt) for prompt in PROMPTS])
        sizes[name] = policy.size
        decoded(drafter, policy)
    assert sizes == {"cheap": LENGTH + 1, "expensive": 1}


def test_new_drafters_are_taken_as_they_are():
    drafter = PaperDrafter(AdjacencyMatrix(VOCABULARY, 8), TreeTemplate.load("ranked-8"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert adapted(drafter) is drafter


def test_a_registered_one_is_adapted(monkeypatch):
    """As an entry point of another package gives it."""
    given = []

    def factory(matrix, template):
        given.append((matrix, template))
        return Everything()

    def entry_points(group, name=None):
        assert group == "token_recycling.drafters"
        points = [SimpleNamespace(name="everything", load=lambda: factory)]
        return [point for point in points if name in (None, point.name)]

    monkeypatch.setattr(drafters, "entry_points", entry_points)
    assert "everything" in drafters.names()
    matrix, template = AdjacencyMatrix(VOCABULARY, 8), TreeTemplate.load("ranked-8")
    with pytest.warns(DeprecationWarning, match="'everything' has the old methods") as caught:
        drafter = make_drafter("everything", matrix, template)
    assert len(caught) == 1
    assert isinstance(drafter, LegacyDrafter)
    assert given == [(matrix, template)]
    decoded(drafter, FixedSize())


@pytest.fixture(scope="module")
def llama():
    return make("llama")


def answered(model, drafter, **options):
    """Wrap ``model`` with a drafter of the first contract; return two answers to one prompt."""
    prompt = random_prompts([12])[0]
    expected = plain(model, prompt, 60)
    with pytest.warns(DeprecationWarning, match="has the old methods") as caught:
        recycler = TokenRecycling(model, drafter=drafter, **options)
    answers = [recycler.generate(prompt, max_new_tokens=60) for _ in range(2)]
    assert [answer.token_ids for answer in answers] == [expected] * 2
    assert len(caught) == 1
    return answers


@pytest.mark.parametrize("graph", [None, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Minimal, Everything])
def test_an_object_recycles_with_a_model(kind, graph, llama):
    first, second = answered(llama, kind(), graph=graph)
    assert second.stats.accepted > first.stats.accepted  # it learns


def test_an_object_that_only_proposes_recycles_with_a_model(llama):
    answered(llama, ProposeOnly())


def test_a_default_argument_does_not_make_a_drafter_new():
    class Boosted(ProposeOnly):
        def propose(self, roots, boost=1.0):
            return super().propose(roots)

    with pytest.warns(DeprecationWarning, match="old"):
        assert isinstance(adapted(Boosted()), LegacyDrafter)


def test_its_own_sources_are_told(llama):
    class Sourced(ProposeOnly):
        def sources(self, draft):
            return ["here"] * draft.nodes

    with pytest.warns(DeprecationWarning, match="old"):
        drafter = adapted(Sourced())
    draft = drafter.propose(drafter.new_rows(1), torch.tensor([3]))
    assert drafter.sources(drafter.new_rows(1), draft) == ["here"] * draft.nodes

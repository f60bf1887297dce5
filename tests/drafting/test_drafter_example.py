"""The drafter of docs/research.md: in the loop, in a graph, in the benchmark."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from token_recycling import TokenRecycling, TokenRecyclingError
from token_recycling.bench.prompts import DEMO
from token_recycling.cli import main
from token_recycling.drafting import registry as drafters
from token_recycling.drafting.adaptive import AdaptiveDrafter
from token_recycling.drafting.base import Drafter
from token_recycling.drafting.draft import root_only
from token_recycling.drafting.matrix import AdjacencyMatrix
from token_recycling.drafting.paper import PaperDrafter
from token_recycling.drafting.templates import TreeTemplate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The class in the document."""
    page = (ROOT / "docs/research.md").read_text("utf-8")
    (code,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "DrafterState" in block
    ]
    folder = tmp_path_factory.mktemp("example")
    (folder / "my_drafters.py").write_text(code, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return importlib.import_module("my_drafters").RepeatDrafter


@pytest.fixture
def registered(example, monkeypatch):
    """As if a package had registered it through the entry point."""
    point = SimpleNamespace(name="repeat", load=lambda: example)
    monkeypatch.setattr(
        drafters, "entry_points", lambda group, name="repeat": [point] if name == "repeat" else []
    )


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_in_the_loop_and_in_a_graph(example, bundled, graph, rows):
    matrix = AdjacencyMatrix(bundled.target.vocab_size, 8)
    drafter = example(matrix, TreeTemplate.chain(6))
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, drafter=drafter, graph=graph)
    prompts = list(DEMO[:rows])
    plain = TokenRecycling(bundled.model, bundled.tokenizer, drafter="none")
    expected = plain.generate(prompts, max_new_tokens=60)
    answers = recycler.generate(prompts, max_new_tokens=60)
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    assert recycler.stats.accepted > 0
    assert (recycler.session._graph is not None) is graph


def test_a_drafter_without_a_first_draft_is_decoded_eagerly(example, bundled):
    """A graph needs the number of nodes before there is any text."""

    class Careful(example):
        def propose(self, rows, roots, size=None):
            draft = super().propose(rows, roots, size)
            return draft if bool(draft.valid[:, 1:].any()) else draft.first(1)

    drafter = Careful(AdjacencyMatrix(bundled.target.vocab_size, 8), TreeTemplate.chain(6))
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, drafter=drafter, graph=True)
    assert recycler.session.graph_decoder() is None
    recycler.generate(DEMO[0], max_new_tokens=60)
    assert recycler.stats.accepted > 0


@pytest.mark.slow
def test_by_name_in_the_benchmark(registered, tmp_path, capsys):
    options = ["--per-kind", "1", "-n", "12", "-o", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--suite", "builtin", "--decoders", "repeat:tree=chain-4", *options])
    assert ended.value.code == 0
    summary = json.loads((tmp_path / "out/summary.json").read_text("utf-8"))
    found = summary["decoders"]["repeat:tree=chain-4"]["overall"]
    assert found["identical"] == 1
    assert found["mat"] > 1


def test_a_registered_drafter_that_cannot_be_imported_is_one_clear_line(monkeypatch, capsys):
    def load():
        raise ImportError("no module named 'their_kernel'")

    point = SimpleNamespace(name="broken", load=load)
    monkeypatch.setattr(drafters, "entry_points", lambda **given: [point])
    assert drafters.names().count("broken") == 1
    with pytest.raises(SystemExit) as ended:
        main(["generate", "-p", "Once", "--drafter", "broken"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "cannot load the drafter 'broken': ImportError: no module named 'their_kernel'" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("factory", "says"),
    [(lambda matrix, template: 3, "is a int"), (lambda matrix, template: 1 / 0, "ZeroDivision")],
)
def test_a_registered_factory_that_fails_is_one_clear_line(factory, says, monkeypatch, capsys):
    point = SimpleNamespace(name="broken", load=lambda: factory)
    monkeypatch.setattr(drafters, "entry_points", lambda **given: [point])
    with pytest.raises(SystemExit) as ended:
        main(["generate", "-p", "Once", "--drafter", "broken"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_number_of_nodes_holds_for_an_object_too(example, bundled):
    drafter = example(AdjacencyMatrix(bundled.target.vocab_size, 8), TreeTemplate.chain(6))
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, drafter=drafter, nodes=2)
    steps = []
    recycler.generate(DEMO[0], max_new_tokens=40, on_step=steps.append)
    assert max(step.size for step in steps) == 3


def test_its_drafts_are_named_as_they_are(example, bundled):
    """They are verified whole, and their size is known once there has been one."""
    vocabulary = bundled.target.vocab_size

    def made(length):
        drafter = example(AdjacencyMatrix(vocabulary, 8), TreeTemplate.chain(length))
        return TokenRecycling(bundled.model, bundled.tokenizer, drafter=drafter)

    recycler = made(20)
    assert "whole drafts" in repr(recycler)
    assert recycler.batch_invariant
    recycler.generate(DEMO[0], max_new_tokens=8)
    assert recycler.session.largest_draft == 21
    assert recycler.batch_invariant
    large = made(150)
    large.generate(DEMO[0], max_new_tokens=8)
    assert large.session.largest_draft == 151
    assert not large.batch_invariant  # linear.FEW_TOKENS


def test_a_drafter_without_a_name(example, bundled):
    class Nameless(Drafter):
        def propose(self, rows, roots, size=None):
            return root_only(roots)

    with pytest.raises(TokenRecyclingError, match="the drafter Nameless has no name"):
        TokenRecycling(bundled.model, bundled.tokenizer, drafter=Nameless())


def test_a_drafter_derived_from_the_default(bundled):
    """Its drafts are checked; below a matrix that knows little they are padded."""

    class Mine(AdaptiveDrafter):
        name = "mine"

    drafter = Mine(AdjacencyMatrix(bundled.target.vocab_size, 8), 12)
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, drafter=drafter)
    plain = TokenRecycling(bundled.model, bundled.tokenizer, drafter="none")
    expected = plain.generate(DEMO[0], max_new_tokens=60)
    answer = recycler.generate(DEMO[0], max_new_tokens=60)
    assert answer.token_ids == expected.token_ids
    assert answer.stats.accepted > 5


def wrong(change):
    """A drafter whose drafts are changed by ``change``."""

    class Wrong(PaperDrafter):
        def propose(self, rows, roots, size=None):
            draft = super().propose(rows, roots, size)
            return change(draft) if draft.size > 2 else draft

    return Wrong


def with_(draft, name, value):
    part = getattr(draft, name).clone()
    part[:, 2] = value
    return replace(draft, **{name: part})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: with_(d, "parents", 2), "a parent must come before its children"),
        (lambda d: with_(d, "parents", -1), "a parent must come before its children"),
        (lambda d: with_(d, "tokens", -1), "tokens must be from 0 to 4095"),
        (lambda d: with_(d, "tokens", 4096), "tokens must be from 0 to 4095"),
        (lambda d: with_(d, "depths", 5), "depths must be"),
        (
            lambda d: replace(d, tokens=d.tokens.float()),
            r"tokens must be a tensor int64 \[1, \d+\]",
        ),
        (lambda d: replace(d, tokens=d.tokens.roll(1, dims=1)), "node 0 must be the root"),
    ],
)
def test_wrong_drafts_are_one_line(bundled, change, says):
    """A cycle of parents would never end."""
    matrix = AdjacencyMatrix(bundled.target.vocab_size, 8)
    drafter = wrong(change)(matrix, TreeTemplate.load("ranked", 8))
    recycler = TokenRecycling(bundled.model, bundled.tokenizer, drafter=drafter)
    with pytest.raises(TokenRecyclingError, match=f"^the draft of paper is wrong: {says}"):
        recycler.generate(DEMO[0], max_new_tokens=60)
    right = wrong(lambda draft: draft)(matrix, TreeTemplate.load("ranked", 8))  # the control
    TokenRecycling(bundled.model, bundled.tokenizer, drafter=right).generate(DEMO[0])

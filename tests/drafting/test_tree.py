import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import templates
from token_recycling import TokenRecyclingError, TreeTemplate
from token_recycling.drafting.templates import TreeShape, shipped


def test_the_papers_tree():
    tree = TreeTemplate.load("paper")
    assert tree.size == 81
    assert [len(level) for level in tree.levels] == [8, 21, 25, 15, 8, 3]
    assert "2408.08696" in tree.provenance


def test_every_shipped_tree_says_where_it_is_from():
    assert shipped() == ["paper", "ranked"]
    for name in shipped():
        tree = TreeTemplate.load(name)
        assert tree.name == name
        assert tree.provenance
        assert tree.description


def test_a_chain():
    chain = TreeTemplate.load("chain-3")
    assert chain.paths == ((0,), (0, 0), (0, 0, 0))


@settings(max_examples=60, deadline=None)
@given(templates())
def test_the_tensors_say_what_the_paths_say(tree):
    shape = TreeShape(tree, "cpu")
    paths = [(), *tree.paths]
    for node, path in enumerate(paths):
        assert paths[tree.parents[node]] == path[:-1]
        above = {path[:i] for i in range(len(path) + 1)}
        assert {paths[i] for i in shape.ancestors[node].nonzero()[:, 0].tolist()} == above
        assert int(shape.depths[node]) == len(path)


@settings(max_examples=40, deadline=None)
@given(templates(), st.randoms())
def test_compacting_keeps_the_tree(tree, random):
    shape = TreeShape(tree, "cpu")
    tokens = torch.randint(0, 9, (2, tree.size))
    valid = torch.ones_like(tokens, dtype=torch.bool)
    for row in range(2):
        for node in range(1, tree.size):
            parent = tree.parents[node]
            valid[row, node] = bool(valid[row, parent]) and random.random() < 0.7
    full = shape.draft(tokens, valid)
    small = full.compact()
    kept = valid.any(dim=0).nonzero()[:, 0].tolist()
    assert small.tokens.shape[1] == len(kept)
    for row in range(2):
        for i, node in enumerate(kept):
            assert small.tokens[row, i] == tokens[row, node]
            if valid[row, node]:
                assert kept[int(small.parents[row, i])] == tree.parents[node]
            ancestors = small.ancestors[row, i].nonzero()[:, 0].tolist()
            before = shape.ancestors[node].nonzero()[:, 0].tolist()
            assert [kept[j] for j in ancestors] == [j for j in before if j in kept]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "no paths"),
        (None, "no paths"),
        ("text", "no paths"),
        ([[0], []], r"\[\] is not a path"),
        ([[0], [0, 1, 2]], r"\[0, 1, 2\] has no parent \[0, 1\]"),
        ([[0], [1], [0]], r"\[0\] appears twice"),
        ([[0], [-1]], r"\[-1\] is not a path"),
        ([[0], ["a"]], r'\["a"\] is not a path'),
        ([[0], [True]], r"\[true\] is not a path"),
        ([[0], 5], "5 is not a path"),
    ],
)
def test_a_wrong_path_is_named(paths, message, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"paths": paths}))
    with pytest.raises(TokenRecyclingError, match=message):
        TreeTemplate.load(file)


def test_a_rank_beyond_k_is_named():
    with pytest.raises(TokenRecyclingError, match=r"path \[4\] uses rank 4.*k=4"):
        TreeTemplate.load("paper").check_k(4)


def test_a_file_of_bare_paths(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text("[[1], [0], [0, 2]]")
    tree = TreeTemplate.load(file)
    assert (tree.name, tree.paths) == ("mine", ((0,), (1,), (0, 2)))


def test_acceptance_probabilities_order_the_paths_of_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"paths": [[0], [0, 0], [1]], "acceptance": [0.6, 0.1, 0.3]}))
    tree = TreeTemplate.load(file)
    assert (tree.paths, tree.acceptance) == (((0,), (1,), (0, 0)), (0.6, 0.3, 0.1))
    for wrong, message in (
        ([0.6, 0.1], "one number from 0 to 1 per path"),
        ([0.1, 0.6, 0.3], r"path \[0, 0\]"),
    ):
        file.write_text(json.dumps({"paths": [[0], [0, 0], [1]], "acceptance": wrong}))
        with pytest.raises(TokenRecyclingError, match=message):
            TreeTemplate.load(file)


def test_the_drawing_shows_every_node():
    drawing = TreeTemplate.from_paths("t", [[0], [1], [0, 0], [0, 3]]).draw()
    assert drawing == "root\n├─0\n│ ├─0\n│ └─3\n└─1"

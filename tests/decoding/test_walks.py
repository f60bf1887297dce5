"""The paths that a target takes through drafts, also those chosen on the way."""

import numpy as np
import pytest
import torch

from token_recycling.decoding.walks import (
    follow,
    host_walk,
    longest_paths,
    path_along,
)
from token_recycling.drafting.draft import chains
from token_recycling.drafting.templates import TreeShape, TreeTemplate
from token_recycling.util.tokens import NO_TOKEN


def test_padding_is_on_no_branch():
    """Nodes that hold no token, with and without themselves among their ancestors."""
    draft = chains(torch.tensor([[5, 6, 7]])).padded(6)
    choices = torch.tensor([[6, 7, 8, 0, 0, 0]])
    path, counts = longest_paths(draft, choices)
    assert path[0, :3].tolist() == [0, 1, 2]
    assert counts.tolist() == [3]
    draft = draft.up_to(torch.tensor([2]))
    path, counts = longest_paths(draft, choices)
    assert counts.tolist() == [2]
    assert path[0, :2].tolist() == [0, 1]


def test_rows_that_take_no_part_or_end_choose_nothing_more():
    children = [{(0, 5): 1, (1, 6): 2}, {(0, 5): 1}, {(0, 5): 1, (1, 6): 2}]
    asked = []

    def choose(rows, nodes):
        asked.append((rows, nodes))
        if nodes[0] == 1:
            children[2].clear()
        return [5 + node for node in nodes]

    paths, emitted = follow([0, 2], children, choose)
    assert asked == [([0, 2], [0, 0]), ([0, 2], [1, 1]), ([0], [2])]
    assert paths == [[0, 1, 2], [], [0, 1]]
    assert emitted == [[5, 6, 7], [], [5, 6]]


@pytest.mark.parametrize("seed", range(20))
def test_the_path_follows_from_the_tokens_alone(seed):
    """As engines know them. Each token stands once below a node; padding is on no path."""
    random = np.random.default_rng(seed)
    shape = TreeShape(TreeTemplate.load("ranked", 4).first(20), "cpu")
    tokens = torch.from_numpy(random.integers(0, 50, (6, 21)))
    draft = shape.draft(tokens, torch.ones_like(tokens, dtype=torch.bool))
    draft = draft.up_to(torch.from_numpy(random.integers(1, 22, 6))).padded(24)
    children = {
        (row, int(draft.parents[row, n]), int(draft.tokens[row, n]))
        for row in range(6)
        for n in range(1, 24)
        if draft.valid[row, n]
    }
    choices = torch.from_numpy(random.integers(0, 50, (6, 24)))
    for row, node, token in sorted(children):
        if random.random() < 0.8:
            choices[row, node] = token  # so that paths are long
    parts = [part.numpy() for part in (draft.tokens, draft.parents, draft.valid)]
    path = np.empty((6, draft.max_depth + 1), np.int64)
    emitted = np.empty_like(path)
    counts = np.empty((2, len(path)), np.int64)
    host_walk(*parts[:2], draft.depths.numpy(), parts[2], choices.numpy(), path, emitted, counts)
    assert counts[0].tolist() == parts[2].sum(1).tolist()
    assert counts[1].tolist() == (emitted != NO_TOKEN).sum(1).tolist()
    found = path_along(draft, torch.from_numpy(emitted)).numpy()
    twice = len(children) < int(draft.valid[:, 1:].sum())  # a token stands twice below a node
    assert twice or (found == path).all()
    assert path.max() > 1
    other = torch.from_numpy(np.roll(emitted, 1, axis=1))
    found = path_along(draft, other).numpy()  # other tokens, another path
    assert (found != path).any()

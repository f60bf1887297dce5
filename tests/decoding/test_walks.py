"""The branch that a target would take through a draft, and walks that choose as they go."""

import torch

from token_recycling.decoding.walks import follow, likeliest_children, longest_paths
from token_recycling.drafting.draft import chains


def likeliest(draft):
    logits = torch.zeros(1, draft.size, 9)
    return longest_paths(draft, likeliest_children(draft, logits))


def test_padding_is_on_no_branch():
    """Nodes that hold no token, with and without themselves among their ancestors."""
    draft = chains(torch.tensor([[5, 6, 7]])).padded(6)
    path, counts = likeliest(draft)
    assert path[0, :3].tolist() == [0, 1, 2]
    assert counts.tolist() == [3]
    draft = draft.up_to(torch.tensor([2]))
    path, counts = likeliest(draft)
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

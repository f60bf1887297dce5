"""A node of a draft has the bits of a plain step, wherever in the context it is."""

import pytest
import torch

from architectures import make
from models import random_prompts
from token_recycling.drafting.draft import root_only
from token_recycling.drafting.templates import TreeShape, TreeTemplate
from token_recycling.model.cpu import threads
from token_recycling.model.cpu.attention_kernel import KEYS
from token_recycling.model.probe import open_target

pytestmark = pytest.mark.skipif(
    threads.openmp() is None, reason="PyTorch has no GNU OpenMP runtime here"
)
WIDTH = 6  # children of the root, and of the last of them


@pytest.fixture(scope="module")
def target():
    return open_target(make("llama"))


def plain_steps(target, prompt, tokens):
    """Return the logits of tokens that are read one after another."""
    target.reset()
    target.prefill([prompt])
    found = []
    for token in tokens:
        found.append(target.verify(root_only(torch.tensor([token])))[0, 0].clone())
        target.commit(torch.tensor([[0]]), [1])
    return found


def in_a_tree(target, prompt, tokens):
    """Return the logits of three tokens on a path of a tree, other nodes between them."""
    last = WIDTH - 1
    paths = [[n] for n in range(WIDTH)] + [[last, n] for n in range(WIDTH)]
    shape = TreeShape(TreeTemplate.from_paths("wide", paths), torch.device("cpu"))
    nodes = torch.tensor([[tokens[0], *[9] * last, tokens[1], *[9] * last, tokens[2]]])
    target.reset()
    target.prefill([prompt])
    logits = target.verify(shape.draft(nodes, torch.ones_like(nodes, dtype=torch.bool)))[0]
    return [logits[at] for at in (0, WIDTH, 2 * WIDTH)]


@pytest.mark.parametrize("left", [60, 13, 12, 8, 5, 3, 2, 1, 0])
def test_a_path_across_blocks_of_keys(target, left):
    """``left`` positions are left in the block of the root."""
    (text,) = random_prompts([KEYS + 2])
    prompt, tokens = text[: KEYS - 1 - left], text[KEYS - 1 - left :][:3]
    steps, nodes = plain_steps(target, prompt, tokens), in_a_tree(target, prompt, tokens)
    target.reset()
    target.prefill([prompt])
    deepest = target.deepest(1)
    assert deepest == left
    same = [torch.equal(one, other) for one, other in zip(steps, nodes)]
    assert all(same[: deepest + 1])
    if left == 0:
        assert not all(same)  # deeper nodes do differ, so that they are left out


def test_rows_of_a_batch_and_plain_targets_have_no_such_limit(target):
    assert target.deepest(2) is None

"""The step of a GPU, in Triton's interpreter: its text, and the kernels around the forward.

``make test-device-kernels`` installs Triton and sets TRITON_INTERPRET=1. A step takes most of a
second in the interpreter, so that texts are short.
"""

import os
import warnings
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from gpu_launches import Launches

from architectures import make
from models import plain, random_prompts
from skinny_kernels.gpu.attention import paths_of
from skinny_kernels.modes import ordinary_tensors
from skinny_kernels.windows import AttentionWindow
from token_recycling import TokenRecycling
from token_recycling.decoding.sequence import Sequence
from token_recycling.drafting.draft import chains
from token_recycling.drafting.kernels.device import learn, propose
from token_recycling.graph import kernels, tensors
from token_recycling.graph.step import GraphStep, StepSpec

MOST_LAUNCHES = 20
TOKENS = 14


@pytest.fixture(autouse=True)
def few_lanes(monkeypatch):
    """As few lanes as nodes, which the interpreter computes in less time than 64."""
    for module in (propose, learn, kernels):
        monkeypatch.setattr(module, "LEAST_NODES", 2)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_launches_few_kernels_around_the_forward(architecture, batch):
    model = make(architecture)
    recycler = TokenRecycling(model, nodes=15, graph=False)
    prompts = random_prompts([9, 5, 12][:batch])
    recycler.generate(prompts, max_new_tokens=3)
    step = GraphStep(
        recycler.target, recycler.drafter, StepSpec(batch, 256, 16, kernels=True, drafts="device")
    )
    recycler.target.prefill([prompt[:-1] for prompt in prompts])
    with ordinary_tensors():
        step.begin([Sequence(prompt) for prompt in prompts], [])
    names = Launches(recycler.target.shadow).during(step)
    print(len(names), names)
    assert {"_propose", "_count", "_learn"} <= set(names)
    assert len(names) <= MOST_LAUNCHES
    layers = model.config.get_text_config().num_hidden_layers
    assert layers > 1  # the commit must not launch kernels per layer


def test_drafts_may_share_their_rows_memory():
    """As those of ``chains``, of which ``first`` takes a part: no tensor is contiguous."""
    draft = chains(torch.tensor([[5, 7, 9, 4], [3, 8, 8, 6]])).first(3)
    assert not any(part.is_contiguous() for part in (draft.tokens, draft.depths, draft.ancestors))
    lengths = torch.tensor([6, 4])
    inputs = ({"full": AttentionWindow("full")}, lengths, draft, 16, None, torch.float32)
    *laid_out, (paths, depths) = kernels.layout(*inputs)
    for found, expected in zip(laid_out, tensors.layout(*inputs)[:3], strict=True):
        assert found.equal(expected)
    expected, path_depths = paths_of(draft.ancestors)
    assert depths.equal(path_depths)
    on_path = torch.arange(draft.size) < depths[:, :, None]
    assert paths[on_path].equal(expected[on_path])
    choices = torch.tensor([[7, 9, 1], [8, 2, 1]])
    roots = [draft.tokens[:, 0].clone() for _ in range(2)]
    accepted, found = kernels.accept(draft, choices, roots[0])
    assert accepted.counts.tolist() == [3, 2]
    assert found.equal(tensors.accept(draft, choices, roots[1])[1])
    assert roots[0].equal(roots[1])


def answers(model, prompts, *, graph=True, **options):
    """Two answers per prompt, of which the second has drafts to accept, and their statistics."""
    recycler = TokenRecycling(model, nodes=5, graph=graph, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the graph must be used
        found = [recycler.generate(prompts, max_new_tokens=TOKENS, **options) for _ in range(2)]
    if graph:
        (runner,) = recycler.session._graph.pool._steps.values()
        assert runner.step._operations is kernels
    return [[answer.token_ids for answer in each] for each in found], recycler.stats


@pytest.mark.parametrize(("architecture", "lengths"), [("llama", [9]), ("gemma3", [20, 6])])
def test_the_text_is_that_of_generate(architecture, lengths):
    """One row, and two of different lengths with full and sliding windows."""
    model = make(architecture)
    prompts = random_prompts(lengths)
    expected = [plain(model, prompt, TOKENS) for prompt in prompts]
    found, stats = answers(model, prompts)
    assert found == [expected, expected]
    assert stats.accepted > 0


def test_sampled_text_is_that_of_the_eager_loop():
    model = make("llama")
    prompts = random_prompts([9, 4])
    options = {"temperature": 0.6, "seed": 3}
    assert (
        answers(model, prompts, **options)[0] == answers(model, prompts, graph=False, **options)[0]
    )


@pytest.mark.parametrize("what", ["mask", "commit", "positions", "acceptance"])
def test_breaking_a_part_turns_this_red(monkeypatch, what):
    """The first steps, which are compared with eager ones, are just as wrong."""
    model = make("llama")
    prompts = random_prompts([9])
    layout, commit, accept = kernels.layout, kernels.commit, kernels.accept

    def broken_layout(windows, lengths, draft, *others):
        if what == "mask":
            draft = replace(draft, ancestors=torch.ones_like(draft.ancestors))
        positions, slots, masks, paths = layout(windows, lengths, draft, *others)
        return positions + (what == "positions") * draft.depths, slots, masks, paths

    def broken_commit(cache, path, counts):
        commit(cache, path * 0 if what == "commit" else path, counts)

    def broken_accept(draft, choices, roots):
        if what == "acceptance":
            choices = torch.where(draft.depths == 0, choices, draft.tokens)
        return accept(draft, choices, roots)

    monkeypatch.setattr(kernels, "layout", broken_layout)
    monkeypatch.setattr(kernels, "commit", broken_commit)
    monkeypatch.setattr(kernels, "accept", broken_accept)
    assert answers(model, prompts)[0][1] != [plain(model, prompts[0], TOKENS)]

"""A node of a draft has the bits of a plain step, wherever in the context it is."""

from functools import partial

import pytest
import torch

from architectures import make
from models import random_prompts
from skinny_kernels import layers, sdpa, team
from skinny_kernels.attention_kernel import KEYS
from skinny_kernels.batch_invariance import RoundingWatch
from token_recycling import TokenRecycling
from token_recycling.drafting.draft import chains, root_only
from token_recycling.drafting.templates import TreeShape, TreeTemplate
from token_recycling.model import probe
from token_recycling.model.probe import has_bits_of_plain_steps, open_target
from token_recycling.model.target import TreeTarget

pytestmark = pytest.mark.skipif(
    not team.is_available(), reason="there is no team of threads on this machine"
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
    (deepest,) = target.deepest()
    assert deepest == left
    same = [torch.equal(one, other) for one, other in zip(steps, nodes)]
    assert all(same[: deepest + 1])
    if left == 0:
        assert not all(same)  # deeper nodes do differ, so that they are left out


LENGTHS = (5, KEYS - 3, 40, 2 * KEYS + 1, KEYS)


@pytest.mark.parametrize("nodes", [1, 5, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_batch_are_what_they_are_alone(dtype, nodes):
    """Prompts of any lengths, and steps of more than 128 rows."""
    check_rows(open_target(make("llama").to(dtype)), nodes)


def check_rows(target, nodes=5):
    prompts = random_prompts(LENGTHS)
    drafts = torch.tensor(random_prompts([nodes] * len(prompts), seed=2))
    target.reset()
    first = target.prefill(prompts).clone()
    steps = []
    for _ in range(2):
        steps.append(target.verify(chains(drafts)).clone())
        target.commit(torch.arange(nodes).expand(len(prompts), -1), [nodes] * len(prompts))
    for row, prompt in enumerate(prompts):
        target.reset()
        assert torch.equal(target.prefill([prompt])[0], first[row])
        for step in steps:
            assert torch.equal(target.verify(chains(drafts[row : row + 1]))[0], step[row])
            target.commit(torch.arange(nodes)[None], [nodes])


@pytest.mark.parametrize("fault", ["slots", "rows", "prompts", "attention"])
def test_broken_variants_are_noticed(fault, monkeypatch):
    with monkeypatch.context() as patch:
        if fault == "slots":  # keys counted by slots
            mark = sdpa.pack_queries
            patch.setattr(sdpa, "pack_queries", lambda masks, committed: mark(masks))
        elif fault == "attention":  # PyTorch's
            patch.setattr(sdpa.cpu, "fits", lambda *a: False)
        elif fault == "rows":  # PyTorch multiplies what has many rows
            ours = layers._is_ours
            few = lambda x, most=128: ours(x, most) and x.numel() <= 128 * x.shape[-1]  # noqa: E731
            patch.setattr(layers, "_is_ours", few)
        else:  # prompts are read together
            read = TreeTarget.prefill
            patch.setattr(
                TreeTarget,
                "prefill",
                lambda self, prompts, **o: together(self, read, prompts, **o),
            )
        with pytest.raises(AssertionError):
            test_rows_of_a_batch_are_what_they_are_alone(torch.float32, 30)


def test_what_a_gpu_is_asked_finds_other_roundings(monkeypatch):
    """On a CPU: our kernels have the bits of plain steps, and PyTorch's have not."""
    model = make("llama")
    prefix, path = random_prompts([20, 3])
    assert has_bits_of_plain_steps(open_target(model), prefix, path)
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_is_ours", lambda x, most=128: False)
        assert not has_bits_of_plain_steps(open_target(model), prefix, path)
    # A draft in which a node sees others is not taken for one of the same bits.
    scattered = probe._scattered

    def mixed(*shape):
        draft = scattered(*shape)
        draft.ancestors[:, -1] = True
        return draft

    monkeypatch.setattr(probe, "_scattered", mixed)
    assert not has_bits_of_plain_steps(open_target(model), prefix, path)


def together(target, read, prompts, **options):
    """Read prompts as on other devices."""
    kept, target.recordings = target.recordings, None
    try:
        return read(target, prompts, **options)
    finally:
        target.recordings = kept


@pytest.mark.parametrize("fault", [False, True])
def test_what_is_learnt_from_a_prompt_changes_no_bit(fault, monkeypatch):
    """The LM head multiplies the last token and all those that are learnt from."""
    if fault:
        monkeypatch.setattr(layers, "_lm_head", layers._linear)
    target, (prompt,) = open_target(make("llama")), random_prompts([400])
    alone = target.prefill([prompt]).clone()
    columns = []
    learnt = target.prefill([prompt], learn_prompt=lambda *a: columns.append(a[0].shape[1]))
    assert sum(columns) > 128
    assert torch.equal(alone, learnt) != fault


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_probe_finds_out(dtype):
    assert open_target(make("llama").to(dtype)).batch_invariant


def by_pytorch(*arguments):
    """``forward`` of any layer: the class's own."""
    (stock,) = (value for value in arguments if isinstance(value, partial))
    (inputs,) = (value for value in arguments if type(value) is torch.Tensor)
    return stock(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name, invariant",
    [
        ("_linear", False),
        ("_lm_head", False),
        ("_first_projection", False),
        ("_other_projection", False),
        ("_mlp", True),  # of layers and activations that are kernels too
        ("_mlp and _activation", False),
        ("attention", False),
        # PyTorch computes these row by row
        ("_norm", True),
        ("_rotary", True),
    ],
)
def test_each_operation_by_pytorch(name, invariant, dtype, monkeypatch):
    """In bfloat16, PyTorch's products have the same bits for matrices as small as these."""
    if name == "attention":
        monkeypatch.setattr(sdpa.cpu, "fits", lambda *inputs: False)
    elif name == "_rotary":
        monkeypatch.setattr(layers, name, lambda stock, *inputs: stock(*inputs))
    else:
        for one in name.split(" and "):
            monkeypatch.setattr(layers, one, by_pytorch)
    target = open_target(make("llama").to(dtype))
    assert target.recordings is not None
    assert target.batch_invariant == invariant
    if invariant:
        test_rows_of_a_batch_are_what_they_are_alone(dtype, 5)


@pytest.mark.parametrize(
    "name, size, invariant",
    [
        ("phi3", 64, True),
        ("gemma3", 64, True),
        ("starcoder2", 64, True),
        ("phi3", 48, True),
        ("gemma3", 48, True),
        ("starcoder2", 48, True),
        ("gpt2", 64, False),
        ("mixtral", 64, False),
        ("gptj", 64, False),  # attention of its own
    ],
)
def test_other_architectures(name, size, invariant):
    for dtype in (torch.float32, torch.bfloat16):
        model = make(name, **{"n_inner" if name[:3] == "gpt" else "intermediate_size": size})
        target = open_target(model.to(dtype))
        assert target.batch_invariant == invariant
        if invariant:
            check_rows(target)


@pytest.mark.parametrize("threads, invariant", [(1, True), (2, True), (3, False)])
def test_activations_of_several_threads(threads, invariant, monkeypatch):
    """Each thread computes a part of the numbers, which ends somewhere in a row."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with RoundingWatch() as watch:
        torch.nn.functional.silu(torch.zeros(1, 1, 8960, dtype=torch.bfloat16))
    assert (watch.operation is None) == invariant


def test_the_probe_compares_bits(monkeypatch):
    """Another rounding of several tokens is noticed, whoever computes them."""
    rounding = lambda x: 1 + 1e-6 * (x.shape[1] > 1)  # noqa: E731
    monkeypatch.setattr(layers, "_norm", lambda added, norm, stock, x: stock(x) * rounding(x))
    assert not open_target(make("llama")).batch_invariant


class TestRecycler:
    def test_it_says_so(self):
        model, (prompt,) = make("llama").bfloat16(), random_prompts([20])
        recycler = TokenRecycling(model)
        assert recycler.batch_invariant
        assert ", batch-invariant" in repr(recycler)
        assert recycler.generate(prompt, max_new_tokens=4).batch_invariant

    @pytest.mark.parametrize("option", [{"nodes": 128}, {"graph": True}])
    def test_where_it_does_not_hold(self, option):
        recycler = TokenRecycling(make("llama"), **option)
        assert not recycler.batch_invariant
        assert "batch-invariant" not in repr(recycler)

    @pytest.mark.parametrize("nodes", [None, 3, 40])
    @pytest.mark.parametrize("sampled", [False, True])
    @pytest.mark.parametrize("float32_logits", [False, True])
    def test_texts_are_those_without_drafts(self, nodes, sampled, float32_logits):
        """In bfloat16, where the best tokens of a random model are nearly tied."""
        model, prompts = make("llama").bfloat16(), random_prompts([130, 9, 200, 40])
        options = {"temperature": 0.9, "seed": 1} if sampled else {}
        both = {"float32_logits": float32_logits}
        plain = TokenRecycling(model, drafter="none", **both)
        recycler = TokenRecycling(model, nodes=nodes, **both)
        alone = [plain.generate(one, max_new_tokens=40, **options).token_ids for one in prompts]
        assert [
            recycler.generate(one, max_new_tokens=40, **options).token_ids for one in prompts
        ] == alone
        if not sampled:
            batch = recycler.generate(prompts, max_new_tokens=40)
            assert [one.token_ids for one in batch] == alone

    def test_texts_of_a_kept_context(self):
        model, turns = make("llama").bfloat16(), random_prompts([60, 150, 30])
        texts = []
        for options in ({"drafter": "none"}, {"nodes": 7}, {"nodes": 40}):
            recycler, prompt = TokenRecycling(model, **options), []
            for turn in turns:
                prompt = prompt + turn
                answer = recycler.generate(prompt, max_new_tokens=30, keep_context=True)
                prompt = prompt + answer.token_ids
            texts.append(prompt)
        assert texts[0] == texts[1] == texts[2]

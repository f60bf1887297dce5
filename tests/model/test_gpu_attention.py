"""The attention kernel for GPUs in Triton's interpreter, against float64.

``make test-device-kernels`` installs Triton and sets TRITON_INTERPRET=1.
"""

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from architectures import make
from models import plain, random_prompts
from skinny_kernels import sdpa as packing
from skinny_kernels.gpu import attention as gpu
from skinny_kernels.gpu import attention_launch
from skinny_kernels.gpu.attention_launch import attend
from skinny_kernels.windows import AttentionWindow, additive_masks
from token_recycling import TokenRecycling

WINDOWS = (AttentionWindow("full"), AttentionWindow("sliding", 9), AttentionWindow("chunked", 7))


def view_tree(lengths, positions, ancestors, windows):
    """What nodes see, for each of the windows."""
    paths = gpu.paths_of(ancestors)
    return [gpu.TreeView(lengths, positions, *paths, window) for window in windows]


def a_tree(rng, batch, n):
    """Parents before children; depths and ancestors."""
    ancestors = torch.eye(n, dtype=torch.bool).repeat(batch, 1, 1)
    depths = torch.zeros(batch, n, dtype=torch.long)
    for row in range(batch):
        for node in range(1, n):
            parent = int(torch.randint(0, node, (1,), generator=rng))
            ancestors[row, node] |= ancestors[row, parent]
            depths[row, node] = depths[row, parent] + 1
    return depths, ancestors


class Case:
    """Random queries, keys and values behind committed rows of several lengths."""

    def __init__(self, n, batch=1, group=1, heads=2, size=16, lengths=None, window=WINDOWS[0],
                 dtype=torch.float32, spare=3, seed=0):  # fmt: skip
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.tensor(lengths or [37, 5, 20, 0][:batch])
        slots = int(lengths.max()) + n + spare
        depths, ancestors = a_tree(rng, batch, n)
        self.ancestors, self.positions = ancestors, lengths[:, None] + depths
        (self.view,) = view_tree(lengths, self.positions, ancestors, [window])
        self.query = torch.randn(batch, heads * group, n, size, generator=rng).to(dtype)
        # As in a cache: a view of tensors with more room.
        whole = torch.randn(2, batch, heads, slots + 5, size, generator=rng).to(dtype)
        whole[:, :, :, int(lengths.max()) + n :] = torch.nan  # slots that hold nothing
        self.key, self.value = whole[0, :, :, :slots], whole[1, :, :, :slots]
        self.group, self.n, self.end = group, n, int(lengths.max())

    def mask(self, dtype=torch.float64):
        lengths, positions, window = self.view.lengths, self.positions, self.view.window
        ancestors = self.ancestors
        every = torch.arange(self.end + self.n)
        committed = (every[: self.end] < lengths[:, None])[:, None].expand(-1, self.n, -1)
        visible = torch.cat([committed, ancestors], dim=2)
        keys = torch.cat([every[: self.end].expand(len(lengths), -1), positions], dim=1)
        return additive_masks({"x": window}, visible, positions, keys, dtype)

    def expected(self):
        """[B, n, H, D] in float64."""
        key, value = (
            one[:, :, : self.end + self.n].double().repeat_interleave(self.group, dim=1)
            for one in (self.key, self.value)
        )
        scores = self.query.double() @ key.transpose(2, 3) * 0.3 + self.mask()
        return (scores.softmax(-1) @ value).transpose(1, 2)

    def found(self, ancestors=None, **changes):
        view = self.view._replace(**changes)
        if ancestors is not None:
            (view,) = view_tree(view.lengths, view.positions, ancestors, [view.window])
        return attend(self.query, self.key, self.value, view, 0.3).double()


def close(found, expected, dtype=torch.float32):
    limit = {torch.float32: 2e-6, torch.float16: 3e-3}[dtype]
    return float((found - expected).abs().max()) <= limit * float(expected.abs().max())


@pytest.mark.parametrize("n", [1, 2, 17, 64])
@pytest.mark.parametrize(("batch", "group"), [(1, 1), (1, 3), (4, 2), (2, 8)])
def test_what_nodes_see(n, batch, group):
    case = Case(n, batch, group)
    assert close(case.found(), case.expected())


def test_the_largest_draft():
    case = Case(257, heads=1, group=2)
    assert close(case.found(), case.expected())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n", [1, 17])
def test_windows(window, n):
    case = Case(n, batch=3, window=window, lengths=[150, 5, 20])
    assert close(case.found(), case.expected())


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_sizes_of_heads(size):
    case = Case(5, size=size, heads=1)
    assert close(case.found(), case.expected())


def test_half_precision():
    """Not bfloat16: the interpreter multiplies the bits of its values as integers."""
    case = Case(17, batch=2, group=2, dtype=torch.float16)
    assert close(case.found(), case.expected(), torch.float16)


@pytest.mark.parametrize(("span", "octave"), [(64, 1), (64, 2), (256, 16)])
@pytest.mark.parametrize("length", [0, 1, 62, 63, 64, 126, 127, 128, 500])
def test_spans_of_keys(span, octave, length, monkeypatch):
    """One span or several, and those that have nothing to read."""
    monkeypatch.setattr(attention_launch, "SPAN", span)
    monkeypatch.setattr(attention_launch, "OCTAVE", octave)
    monkeypatch.setattr(attention_launch, "LEAST_SPANS", 1 if octave == 1 else 32)  # 2^32 keys
    case = Case(3, lengths=[length], heads=1, spare=300)
    assert close(case.found(), case.expected())


def test_paths_longer_than_a_block():
    """A chain of 150 nodes, most of whose keys are in no whole block of committed ones."""
    case = Case(150, lengths=[70], heads=1)
    chain = torch.ones(150, 150, dtype=torch.bool).tril()[None]
    case.ancestors, case.positions = chain, 70 + torch.arange(150)[None]
    (case.view,) = view_tree(case.view.lengths, case.positions, chain, [WINDOWS[0]])
    assert close(case.found(), case.expected())


def product(a, b, dtype):
    """A product whose rows have the same bits wherever they are, unlike NumPy's."""
    return np.einsum("qd,dk->qk", a, b, dtype=dtype)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", [40, 126, 700])
def test_a_node_has_the_bits_of_a_step_of_its_own(monkeypatch, window, length):
    """Whatever else is drafted, in other sequences too, and wherever its keys lie."""
    monkeypatch.setattr(np, "matmul", product)  # the interpreter's tl.dot
    case = Case(40, batch=2, group=2, lengths=[length, length + 30], window=window)
    drafted = case.found()[0]
    end = case.end
    for node in (0, 7, 25, 39):
        path = case.ancestors[0, node].nonzero()[:, 0]
        key, value = case.key[:1].clone(), case.value[:1].clone()
        for one in (key, value):  # as if the path before the node had been committed
            nodes = one[:, :, end + path].clone()
            one[:, :, length : length + len(path)] = nodes
        before = torch.tensor([length + len(path) - 1])
        one_node = torch.ones(1, 1, 1, dtype=torch.bool)
        (view,) = view_tree(before, before[None], one_node, [window])
        plain_step = attend(case.query[:1, :, node : node + 1].clone(), key, value, view, 0.3)
        assert plain_step[0, 0].double().equal(drafted[node])


def test_bits_depend_on_the_block_that_keys_are_in(monkeypatch):
    """The control of the test above: another division of the same keys is seen in the bits."""
    case = Case(2, lengths=[200])
    right = case.found()
    monkeypatch.setattr(attention_launch, "BLOCK", 128)
    assert close(case.found(), case.expected())
    assert not case.found().equal(right)


class Paged:
    """The rows of a case in pages, between parts of prompts, which are left out."""

    def __init__(self, case, most=None, page=16):
        batch, heads, _, size = case.query.shape
        n, lengths = case.n, case.view.lengths.tolist()
        self.most, self.case = most or n, case
        blocks_of = -(-(max(lengths) + n) // page)
        rng = torch.Generator().manual_seed(5)
        order = torch.randperm(batch * blocks_of + 3, generator=rng)[: batch * blocks_of]
        self.blocks = order.view(batch, -1).int().repeat_interleave(2, dim=0)
        shared = case.key.shape[1]
        self.cache = torch.full((len(order) + 3, shared, page, 2 * size), torch.nan)
        self.cache = self.cache.to(case.query.dtype)
        for row, length in enumerate(lengths):
            slots = torch.cat([torch.arange(length), torch.arange(case.end, case.end + n)])
            both = torch.cat([one[row][:, slots] for one in (case.key, case.value)], dim=-1)
            for slot in range(length + n):
                self.cache[order.view(batch, -1)[row, slot // page], :, slot % page] = both[:, slot]
        # Every second row is a prompt of more queries than a draft has.
        counts = [count for _ in lengths for count in (n, self.most + 1)]
        self.starts = torch.tensor([0, *counts]).cumsum(0).int()
        self.lengths = torch.tensor([length + n for length in lengths]).int().repeat_interleave(2)
        room = self.most + 2
        self.paths = torch.zeros((2 * batch, room, room), dtype=torch.int32)
        self.depths = torch.zeros((2 * batch, room), dtype=torch.int32)
        self.paths[::2, :n, :n], self.depths[::2, :n] = case.view.paths, case.view.depths
        tokens = int(self.starts[-1])
        self.positions = torch.zeros(tokens, dtype=torch.long)
        self.query = torch.full((tokens, heads, size), torch.nan).to(case.query.dtype)
        for row in range(batch):
            at = slice(int(self.starts[2 * row]), int(self.starts[2 * row]) + n)
            self.positions[at] = case.positions[row]
            self.query[at] = case.query[row].transpose(0, 1)

    def found(self):
        size = self.query.shape[-1]
        view = gpu.TreeView(
            self.lengths, self.positions, self.paths, self.depths, self.case.view.window
        )
        longest = self.blocks.shape[1] * self.cache.shape[2]
        pages = attention_launch.Pages(self.starts, self.blocks, self.most, longest)
        out = torch.full((len(self.query), self.query.shape[1] * size), 7.0).to(self.query.dtype)
        attention_launch.attend_pages(
            self.query, self.cache[..., :size], self.cache[..., size:], view, 0.3, out, pages
        )
        rows = [out[int(begin) :] for begin in self.starts[:-1]]
        for prompt in rows[1::2]:
            assert (prompt[: self.most + 1] == 7).all()
        n = self.case.n
        return torch.stack([row[:n].view(n, -1, size) for row in rows[::2]])


@pytest.mark.parametrize("window", WINDOWS[:2])
@pytest.mark.parametrize("most", [None, 20])
def test_pages(monkeypatch, window, most):
    """An engine's cache: what nodes see is what they see in one piece, bit for bit."""
    monkeypatch.setattr(np, "matmul", product)  # the interpreter's tl.dot
    case = Case(17, batch=3, group=2, window=window, lengths=[150, 5, 70])
    paged = Paged(case, most)
    found = paged.found()
    assert close(found.double(), case.expected())
    assert found.equal(attend(case.query, case.key, case.value, case.view, 0.3))


@pytest.mark.parametrize("fault", ["blocks", "lengths", "paths", "positions"])
def test_wrong_pages_are_noticed(fault):
    paged = Paged(Case(17, batch=2, window=WINDOWS[1], lengths=[150, 5]))
    tensor = getattr(paged, fault)
    changed = {
        "blocks": lambda: tensor.flip(1).clone(),
        "lengths": lambda: tensor - 1,
        "paths": lambda: torch.zeros_like(tensor),
        "positions": lambda: tensor + 3,
    }
    setattr(paged, fault, changed[fault]())
    assert not close(paged.found().double(), paged.case.expected())


def test_a_node_that_sees_nothing_is_zero():
    case = Case(4)
    ancestors = case.ancestors.clone()
    ancestors[0, 2] = False
    found = case.found(ancestors=ancestors, lengths=torch.tensor([0]))
    assert found[0, 2].abs().max() == 0
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("broken", ["lengths", "ancestors", "positions", "window"])
def test_wrong_views_are_noticed(broken):
    """The checks above fail if a node sees other keys."""
    case = Case(17, batch=2, window=WINDOWS[1], lengths=[37, 20])
    wrong = {
        "lengths": case.view.lengths - torch.tensor([0, 1]),
        "ancestors": case.ancestors.transpose(1, 2).contiguous(),
        "positions": case.positions + 3,
        "window": WINDOWS[0],
    }[broken]
    assert not close(case.found(**{broken: wrong}), case.expected())


@pytest.fixture
def used(monkeypatch):
    """Let models on this CPU use the kernel; returns the calls."""
    calls = []

    def noted(*args):
        calls.append(args[0].shape)
        return attend(*args)

    monkeypatch.setattr(packing.cpu, "fits", lambda *a: False)
    monkeypatch.setattr(gpu, "is_here", lambda tensor: True)
    monkeypatch.setattr(gpu, "is_right", lambda *a: True)
    monkeypatch.setattr(attention_launch, "attend", noted)
    return calls


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_text_of_models(name, rows, used):
    model, prompts = make(name), random_prompts([9, 4])[:rows]
    expected = [plain(model, prompt, 12) for prompt in prompts]
    recycler = TokenRecycling(model, nodes=5, strict=True)
    found = recycler.generate(prompts, max_new_tokens=12)
    assert [one.token_ids for one in found] == expected
    assert used


def test_a_wrong_kernel_is_found_when_a_model_is_probed(used, monkeypatch):
    """The control: what the kernel computes is what the model uses."""

    def blind(query, key, value, view, scale):
        causal = torch.ones_like(view.paths, dtype=torch.bool).tril()
        (other,) = view_tree(view.lengths, view.positions, causal, [view.window])
        return attend(query, key, value, other, scale)

    monkeypatch.setattr(attention_launch, "attend", blind)
    with pytest.warns(UserWarning, match="its logits in a tree differ"):
        TokenRecycling(make("llama"), nodes=5)


class TestTrial:
    """Whether the kernel is used, with results that are made up."""

    @pytest.fixture(autouse=True)
    def _no_cuda(self, monkeypatch):
        monkeypatch.setattr(gpu, "_settled", {})
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.capturing = False

    def chosen(self, ours, theirs=lambda: torch.ones(3)):
        query, key = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 30, 8)
        return gpu.is_right(query, key, Case(2).view, ours, theirs)

    def test_a_right_one_once(self):
        assert self.chosen(lambda: torch.ones(3))
        assert self.chosen(lambda: torch.full((3,), 1.01))  # it is settled

    def test_another_result_is_refused(self):
        assert not self.chosen(lambda: torch.full((3,), 1.01))

    def test_nor_one_that_fails(self):
        def failing():
            raise RuntimeError("no")

        assert not self.chosen(failing)

    def test_nothing_is_tried_during_a_capture(self):
        self.capturing = True
        assert not self.chosen(lambda: torch.ones(3))
        self.capturing = False
        assert self.chosen(lambda: torch.ones(3))


def test_a_model_that_the_caller_compiles_has_none_of_it(monkeypatch):
    case = Case(2)
    assert gpu.fits(case.query, case.key, case.value)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not gpu.fits(case.query, case.key, case.value)


def test_views_belong_to_layers(monkeypatch):
    monkeypatch.setattr(gpu, "is_here", lambda tensor: True)
    masks = {kind: torch.zeros(1, 1, 2, 5) for kind in ("full", "sliding")}
    windows = {"full": WINDOWS[0], "sliding": WINDOWS[1]}
    lengths, positions = torch.tensor([3]), torch.tensor([[3, 4]])
    packing.add_views(masks, windows, lengths, positions, torch.eye(2).bool()[None])
    for kind, mask in masks.items():
        assert getattr(mask, packing.VIEW).window == windows[kind]

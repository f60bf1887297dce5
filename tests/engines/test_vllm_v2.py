"""Drafts on the device in vLLM's Model Runner V2, on a CPU: Triton's interpreter runs the kernels.

`make test-vllm` runs this in an environment. A step takes a second, so requests are few.
"""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")

import numpy as np
import torch
from engine_runs import mat, same, serve, served

TRITON = str(Path(__file__).parents[2] / "build" / "triton")
TRITON = {"PYTHONPATH": os.pathsep.join([TRITON, os.environ.get("PYTHONPATH", "")])}
COUNT = 6
ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}


def speculative(tokens=4, **options):
    options = {"automatic": False, "candidates": 4} | options
    config = {"method": "token_recycling", "num_speculative_tokens": tokens, **options}
    return {"speculative_config": config}


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v2")

    def run(*sets, engine=None, **options):
        engine = ENGINE | (engine or {})
        return served(
            "run_vllm.py", folder, TRITON, sets=list(sets), engine=engine, runner="v2", **options
        )

    run.folder = folder
    return run


@pytest.fixture(scope="session")
def plain(run):
    return run("few", "few kinds")


def trees(tokens=6, **options):
    return speculative(tokens, mode="tree", **options)


@pytest.fixture(scope="session")
def plain_on_gpu(run):
    """As with the attention of a GPU, which PyTorch computes here."""
    return run("few", "few kinds", attention="none")


@pytest.fixture(scope="session")
def in_trees(run):
    return run("few", "few kinds", engine=trees(), attention="none")


@pytest.fixture(scope="session")
def ours(run):
    return run("few", "few kinds", engine=speculative())


def test_the_text_is_the_same(plain, ours):
    """Prompts in chunks, shared beginnings that are cached, aborts; slots are used again."""
    assert same(plain["few"], ours["few"]) == COUNT
    print(f"\ntokens a step: {mat(plain['few']):.3f} plain, {mat(ours['few']):.3f}")
    assert ours["few"]["steps"] < 0.85 * plain["few"]["steps"]


def test_seeds_penalties_logprobs_and_grammars(plain, ours):
    """A seed gives the text that it gives without drafts; all else is as without drafts, too."""
    assert same(plain["few kinds"], ours["few kinds"]) == 8
    assert ours["few kinds"]["logprobs"] == pytest.approx(plain["few kinds"]["logprobs"], abs=1e-3)
    assert ours["few kinds"]["reasons"] == plain["few kinds"]["reasons"]


@pytest.mark.parametrize("fault", ["accept all", "shifted draws"])
def test_faults_of_acceptance_show(plain, run, fault):
    broken = run("few", engine=speculative(), mutation=f"v2 {fault}")
    assert same(plain["few"], broken["few"]) < COUNT // 2


def test_the_text_of_trees_is_the_same(plain_on_gpu, in_trees, run):
    """A tree of as many tokens as a chain brings more of them."""
    assert same(plain_on_gpu["few"], in_trees["few"]) == COUNT
    chains = run("few", engine=speculative(6))
    print(f"\ntokens a step: {mat(chains['few']):.3f} chains, {mat(in_trees['few']):.3f} trees")
    assert in_trees["few"]["steps"] < chains["few"]["steps"]


def test_trees_beside_penalties_logprobs_and_grammars(plain_on_gpu, in_trees):
    """Log probabilities are those along the path; what counts tokens by place drafts chains."""
    plain, ours = plain_on_gpu["few kinds"], in_trees["few kinds"]
    assert same(plain, ours) == 8
    assert ours["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-3)
    assert ours["reasons"] == plain["reasons"]


@pytest.mark.parametrize("fault", ["no mask", "no depth positions", "no commit"])
def test_faults_of_trees_show(plain_on_gpu, run, fault):
    broken = run("few", engine=trees(10), attention="none", mutation=f"v2 {fault}")
    assert same(plain_on_gpu["few"], broken["few"]) <= COUNT // 2


@pytest.mark.parametrize("asked", ["one alone", "five at once"])
def test_trees_with_all_kernels_interpreted(run, asked):
    """vLLM's attention for prompts, ours for trees, in the same steps."""
    engine = {"max_num_seqs": 5, "max_num_batched_tokens": 48}
    plain = run(asked, engine=engine, attention="none")
    ours = run(asked, engine=trees() | engine, attention="all")
    assert same(plain[asked], ours[asked]) == len(plain[asked]["texts"])
    assert ours["metrics"]["num_accepted_tokens"] > 0


PARTS = [f"many kinds, part {part}" for part in range(5)]


@pytest.mark.parametrize("part", PARTS)
def test_seeds_of_two_hundred_requests(run, part):
    """Top-k, top-p, min-p: each draft is accepted along the draws of plain decoding."""
    engine = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
    plain = run(*PARTS, engine=engine, attention="none")[part]
    ours = run(part, engine=trees(4) | engine, attention="none", grown=4)
    assert same(plain, ours[part]) == 40
    assert ours["metrics"]["num_accepted_tokens"] > 10


def test_the_distribution_without_seeds(run):
    """Of the second and third token, against plain decoding, by a chi-squared test."""
    engine = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
    plain = run("few draws", engine=engine, attention="none")["few draws"]
    ours = run("few draws", engine=trees(4) | engine, attention="none", grown=4)
    assert ours["metrics"]["num_accepted_tokens"] > 60
    both = [
        Counter(tuple(text[1:]) for text in found["texts"]) for found in (plain, ours["few draws"])
    ]
    assert len({tuple(text) for text in ours["few draws"]["texts"]}) > 6
    assert difference(*both) < 4
    other = Counter(tuple(text[:2]) for text in plain["texts"])  # of other tokens
    assert difference(both[0], other) > 4


def difference(a, b):
    """How far two samples are apart, in standard deviations of what chance brings."""
    rare = [key for key in a | b if a[key] + b[key] < 10]
    counts = [(a[key], b[key]) for key in a | b if key not in rare]
    counts.append((sum(a[key] for key in rare), sum(b[key] for key in rare)))
    total_a, total_b = a.total(), b.total()
    chi = sum(
        (x * (total_b / total_a) ** 0.5 - y * (total_a / total_b) ** 0.5) ** 2 / (x + y)
        for x, y in counts
        if x + y
    )
    free = len(counts) - 1
    return (chi - free) / (2 * free) ** 0.5


@pytest.mark.parametrize("of", [speculative, trees])
def test_preempted_requests(run, of):
    """The cache is too small for three requests at once."""
    small = {"num_gpu_blocks_override": 8, "max_model_len": 128}
    attention = "none" if of is trees else None
    ours = run("growing", engine=of() | small, attention=attention)
    assert ours["preempted"] > 0
    plain = run("growing", attention=attention)
    assert same(plain["growing"], ours["growing"]) == 4


def test_lengths_that_the_scheduler_chooses(plain, run):
    """Drafts pause and begin again: in the interpreter they never pay."""
    ours = run("few", engine=speculative(automatic=True))
    assert same(plain["few"], ours["few"]) == COUNT
    assert 0 < ours["metrics"]["num_drafts"] < ours["few"]["steps"]


def test_what_is_learnt_is_saved(run, tmp_path):
    from token_recycling import AdjacencyMatrix

    path = tmp_path / "matrix.safetensors"
    run("few", engine=speculative(save_matrix=str(path)))
    matrix = AdjacencyMatrix.load(path)
    assert int((matrix.all_candidates[:, 0] >= 0).sum()) > 100
    assert float(matrix.evidence.sum()) > 1000
    again = run("few", engine=speculative(matrix=str(path)))
    cold = run("few", engine=speculative())
    assert again["metrics"]["num_accepted_tokens"] > cold["metrics"]["num_accepted_tokens"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "tree"}, "mode=tree cannot be used with this model: its attention is CPUAtt"),
        ({"drafter": "paper"}, "cannot draft on a GPU: the drafter paper runs only on CPUs"),
        ({"num_speculative_tokens": 70}, "num_speculative_tokens is 70; at most 63"),
    ],
)
def test_what_cannot_be_drafted_is_said(run, options, says):
    engine = ENGINE | speculative(**options)
    if "num_speculative_tokens" in options:
        engine["speculative_config"] |= options
    found = serve("run_vllm.py", run.folder, TRITON, engine=engine, sets=[], runner="v2")
    assert says in found["log"]
    assert "exit code 0" not in found["log"]


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts PyTorch's operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def step(rows, change=lambda speculator: None, names=None):
    """(launches, operations) of a step with trees, with tensors that have no values at all.

    Whoever copied one to the host or asked for its value would fail.
    """
    from skinny_kernels.gpu.launch import collected
    from token_recycling import AdjacencyMatrix
    from token_recycling.drafting.adaptive import AdaptiveDrafter
    from token_recycling.drafting.kernels.device.requests import follow
    from token_recycling.integrations.vllm.device_requests import DeviceRequests
    from token_recycling.integrations.vllm.device_trees import DeviceTrees, _Alike
    from token_recycling.integrations.vllm.speculator import Speculator

    slots, vocabulary, drafted = 64, 100, 6
    on = {"device": torch.device("meta")}
    numbers = torch.zeros(slots, dtype=torch.int32, **on)
    speculator = Speculator.__new__(Speculator)
    speculator.most, speculator._parallel, speculator._keeper = drafted, False, None
    speculator.enable_adaptive_verification, speculator._warming = True, False
    speculator.draft_token_confidence_probs = torch.zeros((slots, drafted), **on)
    speculator.trees = None
    speculator._of_runner = SimpleNamespace(
        total_len=SimpleNamespace(gpu=numbers), prefill_len=SimpleNamespace(gpu=numbers)
    )
    context = torch.zeros((slots, 128), dtype=torch.int32, **on)
    drafter = AdaptiveDrafter(AdjacencyMatrix(vocabulary, 4), 16)
    speculator.requests = DeviceRequests(drafter, context, 17)
    change(speculator)
    nodes = rows * (drafted + 1)
    counts = np.full(rows, drafted)
    of_trees = DeviceTrees.__new__(DeviceTrees)
    of_trees._requests, of_trees._positions = speculator.requests, torch.zeros(nodes, **on)
    of_trees._paths = torch.zeros((slots, 17, 17), dtype=torch.int32, **on)
    of_trees._depths = torch.zeros((slots, 17), dtype=torch.int32, **on)
    cache = torch.zeros((9, 2, 16, 32), **on)
    of_trees._of_layers = lambda: [_Alike(0, torch.zeros(12, dtype=torch.long, **on), cache)]
    slot_mappings = torch.zeros((1, nodes), dtype=torch.long, **on)
    batch = SimpleNamespace(
        num_draft_tokens_per_req=counts,
        query_start_loc=torch.zeros(rows + 1, dtype=torch.int32, **on),
        num_reqs=rows,
        req_ids=names or [str(row) for row in range(rows)],
        idx_mapping=torch.zeros(rows, dtype=torch.long, **on),
        cu_num_logits=torch.zeros(rows + 1, dtype=torch.int32, **on),
    )
    logits = torch.zeros((nodes, vocabulary), **on)
    tokens = torch.zeros(nodes, dtype=torch.long, **on)
    with collected() as launches, Counted() as operations:
        speculator.begin_step(drafted)
        speculator._best = speculator.requests.best(logits)
        followed = follow(
            *(batch.idx_mapping, speculator.requests.branches, speculator.requests.draft),
            *(tokens, tokens, tokens, numbers, batch.cu_num_logits, drafted + 1),
        )
        of_trees.place(batch, slot_mappings)
        of_trees.commit(batch, followed.counts, followed.sources)
        last = torch.zeros((slots, 1), dtype=torch.long, **on)
        drafts = speculator.propose(
            batch, None, None, None, None, numbers[:rows], numbers[:rows], last, None, None, None
        )
        assert drafts.shape == (rows, drafted)
    return len(launches), operations.count


def test_a_step_waits_for_nothing_and_grows_with_nothing():
    launches, operations = step(1)
    assert (launches, operations) == step(48)
    print(f"\n{launches} launches and {operations} operations of PyTorch in a step")
    assert launches <= 12
    assert operations <= 40


def test_what_the_engine_tries_at_first_is_not_learnt():
    loaded = []

    def change(speculator):
        speculator._warming = True
        speculator.requests.matrix.load = lambda: loaded.append(1)

    step(2, change)
    assert loaded == [1]
    step(2, change, names=["_warmup_0_", "_warmup_1_"])
    step(2, change, names=["_v2_mixed_warmup_decode_", "_v2_mixed_warmup_prefill_"])
    assert loaded == [1]


@pytest.mark.parametrize("fault", ["item", "cpu", "per request"])
def test_waiting_shows(fault):
    def change(speculator):
        whole = speculator.requests.learn

        def learn(states, totals, prompts, sampled, *others):
            if fault == "item":
                sampled.sum().item()
            elif fault == "cpu":
                sampled.cpu()
            else:
                for _ in states:
                    whole(states, totals, prompts, sampled, *others)
            return whole(states, totals, prompts, sampled, *others)

        speculator.requests.learn = learn

    if fault == "per request":
        assert step(1, change) != step(48, change)
    else:
        with pytest.raises((RuntimeError, NotImplementedError)):
            step(1, change)

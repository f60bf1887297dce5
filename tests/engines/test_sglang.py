"""SGLang with the plug-in writes what SGLang writes. `make test-sglang` runs this.

SGLang's CPU kernels have no wheel; those of `sgl_kernel_on_cpu`, a test fixture, stand in.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("sglang")
from engine_runs import MODEL, library_mat, mat, same, serve, served
from requests_plan import COUNT, sets
from scipy.stats import chi2_contingency

NODES = 25  # of a draft, the root included
OURS = {"speculative_algorithm": "TOKEN_RECYCLING", "speculative_num_draft_tokens": NODES}
FOLDER = Path(__file__).parent
PATHS = [str(FOLDER / "sgl_kernel_on_cpu"), str(FOLDER), os.environ.get("PYTHONPATH")]
ON_CPU = {
    "PYTHONPATH": os.pathsep.join(filter(None, PATHS)),
    "SGLANG_USE_CPU_ENGINE": "1",
    # Whole drafts: sizes by measured times differ from run to run.
    "TOKEN_RECYCLING_AUTOMATIC": "false",
}
FIRST, SECOND = ["one by one", "plan"], ["turns", "draws"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="session")
def plain(folder):
    return served("run_sglang.py", folder, ON_CPU, lives=[FIRST + SECOND])


@pytest.fixture(scope="session")
def ours(folder):
    return served("run_sglang.py", folder, ON_CPU, lives=[FIRST, SECOND], engine=OURS)


def test_the_text_is_the_same(plain, ours):
    """32 requests, 8 at once, prompts in chunks of 64, shared beginnings, aborts in the middle."""
    assert same(plain["plan"], ours["plan"]) == COUNT
    assert sum(map(len, ours["plan"]["texts"])) > 1000


def test_the_plug_in_is_loaded_again_in_a_new_scheduler(plain, ours):
    """And a second turn reads what trees have written into the cache."""
    assert same(plain["turns"], ours["turns"]) == 16
    assert all(accepted > 1 for accepted in ours["turns"]["accepted"])
    assert sum(cached > 60 for cached in ours["turns"]["cached"][8:]) >= 6


def test_it_accepts_what_the_library_accepts(plain, ours):
    assert same(plain["one by one"], ours["one by one"]) == COUNT
    requests = sets(str(MODEL))["one by one"]["requests"]
    library = library_mat(requests, NODES - 1)
    found = mat(ours["one by one"])
    print(f"\nMAT: library {library:.3f}, sglang {found:.3f}")
    assert found == pytest.approx(library, rel=0.03)
    assert found > 1.5


def test_acceptance_is_in_sglangs_own_figures(plain, ours):
    alone = ours["one by one"]
    # A request of one token verifies nothing, and has no such figures.
    verified = [count for count in alone["verified"] if count]
    assert sum(verified) == alone["steps"] - COUNT
    assert max(accepted for accepted in alone["accepted"] if accepted) > 3
    assert not any(plain["plan"]["accepted"])


@pytest.mark.parametrize("fault", ["no commit", "no depth positions", "no mask"])
def test_faults_show(folder, plain, fault):
    environment = ON_CPU | {"TOKEN_RECYCLING_TEST_FAULT": fault}
    broken = served("run_sglang.py", folder, environment, lives=[["plan"]], engine=OURS)
    assert same(plain["plan"], broken["plan"]) < COUNT // 2


@pytest.mark.parametrize(
    "options",
    [
        {"MAX_STEP_TOKENS": "40"},  # 8 requests get 5 nodes each, and 1 alone 25
        # 8 get roots only; a chain has fewer nodes than 25
        {"MAX_STEP_TOKENS": "6", "CANDIDATES": "1"},
        {"DRAFTER": "paper"},
        {"AUTOMATIC": "true"},
        {"AUTOMATIC": "true", "TEST_FAULT": "varied sizes"},
    ],
)
def test_the_text_is_the_same_with_other_options(folder, plain, options):
    environment = ON_CPU | {f"TOKEN_RECYCLING_{name}": value for name, value in options.items()}
    found = served("run_sglang.py", folder, environment, lives=[["plan"]], engine=OURS)
    assert same(plain["plan"], found["plan"]) == COUNT


def probability_of_one_distribution(*served):
    """Of the sampled requests' tokens behind the first, which a step without drafts draws."""
    found = [
        Counter(tuple(text[1:3]) for i, text in enumerate(one["draws"]["texts"]) if i % 8)
        for one in served
    ]
    kinds = [kind for kind, count in (found[0] + found[1]).items() if count >= 10]
    assert len(kinds) > 5
    return chi2_contingency([[one[kind] for kind in kinds] for one in found]).pvalue


def greedy(one):
    return {tuple(text) for text in one["draws"]["texts"][::8]}


def test_sampled_text_has_the_distribution_of_sampled_text(folder, plain, ours):
    assert probability_of_one_distribution(plain, ours) > 0.001
    assert greedy(plain) == greedy(ours)
    assert len(greedy(plain)) == 1
    # SGLang alone takes the best token wherever there is a draft.
    fault = ON_CPU | {"TOKEN_RECYCLING_TEST_FAULT": "no draws"}
    broken = served("run_sglang.py", folder, fault, lives=[["draws"]], engine=OURS)
    assert probability_of_one_distribution(plain, broken) < 1e-6


def test_without_the_texts_of_pauses_the_check_of_varied_sizes_fails(folder):
    fault = {"AUTOMATIC": "true", "TEST_FAULT": "varied sizes without resuming"}
    environment = ON_CPU | {f"TOKEN_RECYCLING_{name}": value for name, value in fault.items()}
    found = serve("run_sglang.py", folder, environment, lives=[["plan"]], engine=OURS)
    assert "the drafter has another text" in found["log"]


@pytest.mark.parametrize("sizes", [{}, {"AUTOMATIC": "true", "TEST_FAULT": "varied sizes"}])
def test_preempted_requests(folder, plain, sizes):
    """SGLang ends some requests every few steps, as where its cache is full, and begins them again.

    The variable is SGLang's own, for such tests.
    """
    environment = ON_CPU | {f"TOKEN_RECYCLING_{name}": value for name, value in sizes.items()}
    environment["SGLANG_TEST_RETRACT"] = "1"
    found = served("run_sglang.py", folder, environment, lives=[["plan"]], engine=OURS)
    assert sum(found["plan"]["retracted"]) > 0
    assert same(plain["plan"], found["plan"]) == COUNT


@pytest.mark.parametrize(
    ("environment", "engine", "says"),
    [
        (
            {"TOKEN_RECYCLING_MAX_STEP_TOKENS": "lots"},
            OURS,
            "max_step_tokens is 'lots'; it must be a whole number",
        ),
        ({}, OURS | {"page_size": 16}, "page_size(16) > 1"),
    ],
)
def test_bad_options_are_said(folder, environment, engine, says):
    found = serve("run_sglang.py", folder, ON_CPU | environment, lives=[[]], engine=engine)
    assert says in found["log"]
    assert "exit code 0" not in found["log"]


def test_an_unknown_version_is_said(folder):
    environment = ON_CPU | {"TOKEN_RECYCLING_TEST_VERSION": "9.9.9"}
    found = serve("run_sglang.py", folder, environment, lives=[[]], engine=OURS)
    assert "was tested with SGLang 0.5.23; found sglang 9.9.9" in found["log"]
    assert "exit code 0" not in found["log"]


def test_without_the_package_sglang_works(folder, plain):
    """SGLang loads no plug-in of that name, and it cannot be imported."""
    found = served("run_sglang.py", folder, ON_CPU, lives=[["plan"]], without=True)
    assert same(plain["plan"], found["plan"]) == COUNT

"""vLLM with a real model: the plug-in writes what vLLM writes. `make test-real` runs this."""

import os

import pytest

pytest.importorskip("vllm")

from engine_runs import mat, same, served
from requests_plan import COUNT
from test_vllm import WAYS

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not os.environ.get("REAL_MODEL"),
        reason="SmolLM2-135M-Instruct could not be fetched; REAL_MODEL is not set",
    ),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm-real")
    model = os.environ.get("REAL_MODEL")
    return lambda **options: served(
        "run_vllm.py", folder, None, sets=["plan"], model=model, **options
    )


@pytest.fixture(scope="module")
def plain(run):
    return run()


@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_the_same(run, plain, way):
    """32 requests, 8 at once."""
    ours = run(engine=WAYS[way])
    assert same(plain["plan"], ours["plan"]) == COUNT
    assert mat(ours["plan"]) > 1.2


def test_a_fault_shows(run, plain):
    broken = run(engine=WAYS["tree"], mutation="no mask")
    assert same(plain["plan"], broken["plan"]) < COUNT

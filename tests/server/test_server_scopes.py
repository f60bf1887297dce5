"""What the texts of one caller tell another: the matrix, the contexts, the queue."""

from __future__ import annotations

import pytest

from serving import running
from token_recycling import TokenRecycling

COMPLETIONS = "/v1/completions"
ONE, OTHER = {"Authorization": "Bearer one"}, {"Authorization": "Bearer other"}
BODY = {"prompt": "Once upon a time", "max_tokens": 120, "temperature": 0}


def usage(served, headers):
    """Accepted drafted tokens and cached prompt tokens of an answer."""
    found = served.post(COMPLETIONS, headers=headers, **BODY).json()["usage"]
    return (
        found["completion_tokens_details"]["accepted_prediction_tokens"],
        found["prompt_tokens_details"]["cached_tokens"],
    )


@pytest.fixture
def recycler():
    """With fixed draft sizes, so that steps do not depend on the machine's speed."""
    made = TokenRecycling.from_pretrained(device="cpu", nodes=40)
    assert made.options.nodes == 40
    return made


def test_by_default_all_learn_from_all(recycler):
    with running(recycler, keys=["one", "other"]) as served:
        first, cached = usage(served, ONE)
        assert cached == 0
        second, cached = usage(served, OTHER)
        assert second > first
        assert cached > 0


def test_keys_do_not_learn_from_each_other(recycler):
    with running(recycler, keys=["one", "other"], scope="key") as served:
        first, _ = usage(served, ONE)
        again, cached = usage(served, ONE)
        assert again > first
        assert cached > 0
        assert usage(served, OTHER) == (first, 0)


def test_requests_do_not_learn_from_each_other(recycler):
    with running(recycler, scope="request") as served:
        assert len({usage(served, {})[0] for _ in range(3)}) == 1


def test_the_keys_of_a_batch_have_their_own(recycler):
    """Rows of several keys are decoded together, each drafted from its own matrix."""
    with running(recycler, keys=["one", "other"], scope="key") as served:
        first, _ = usage(served, ONE)
        for _ in range(2):
            usage(served, ONE)
        learned, _ = usage(served, ONE)
        assert learned > first
        assert usage(served, OTHER)[0] == first

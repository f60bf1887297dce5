from __future__ import annotations

import pytest

from serving import running
from token_recycling import TokenRecycling


@pytest.fixture(scope="package")
def recycler():
    return TokenRecycling.from_pretrained(device="cpu")


@pytest.fixture(scope="package")
def server(recycler):
    with running(recycler) as served:
        yield served

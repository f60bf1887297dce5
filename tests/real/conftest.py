from __future__ import annotations

import os

import pytest

from token_recycling import TokenRecycling


@pytest.fixture(scope="session")
def folder():
    """The folder of SmolLM2-135M-Instruct, which `make test-real` fetches."""
    if not os.environ.get("REAL_MODEL"):
        pytest.skip("SmolLM2-135M-Instruct could not be fetched; REAL_MODEL is not set")
    return os.environ["REAL_MODEL"]


@pytest.fixture(scope="session")
def loaded(folder):
    """The model with drafts of a fixed size: with an automatic one, many steps would be plain."""
    return TokenRecycling.from_pretrained(folder, device="cpu", nodes=4)


@pytest.fixture
def real(loaded):
    """The same with an empty matrix."""
    loaded.reset()
    return loaded

"""What the tests of graphs share."""

import pytest

from architectures import make


@pytest.fixture(scope="module")
def llama():
    return make("llama")

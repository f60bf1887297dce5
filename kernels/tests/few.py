"""Parameters of tests that take long, of which ``make test`` runs a few."""

import pytest


def first_of(parameters, count=1):
    """The first parameters, and the others for ``make test-slow``."""
    return [
        one if number < count else pytest.param(one, marks=pytest.mark.slow)
        for number, one in enumerate(parameters)
    ]

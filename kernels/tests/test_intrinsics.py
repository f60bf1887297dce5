"""Functions that are emitted, as compiled functions call them."""

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numba
import pytest

import skinny_kernels
from skinny_kernels.intrinsics import Known, Word, emits
from skinny_kernels.vectors import I64, Emitter


class Pair(NamedTuple):
    first: Any
    second: Any


@emits
def weighed(emitter: Emitter, weight: Known, pair: Pair, added: Word) -> Word:
    """Return ``first * weight - second + added``."""
    b = emitter.b
    return b.add(b.sub(b.mul(pair.first, I64(weight)), pair.second), added)


@numba.njit
def of_three(first, second, added):
    return weighed(10, Pair(second=second, first=first), added)


@numba.njit
def of_a_variable(weight):
    return weighed(weight, Pair(1, 2), 3)


def test_arguments_by_name():
    assert of_three(5, 3, 2) == 49


def test_what_must_be_known_is_refused_if_it_is_not():
    with pytest.raises(numba.errors.TypingError, match="must be a constant"):
        of_a_variable(3)


def test_every_intrinsic_has_a_name_of_its_own():
    """Numba knows machine code by names."""
    assert (weighed.__module__, weighed.__qualname__) == (__name__, "weighed")
    assert weighed.__doc__.startswith("Return")
    names = [file.stem for file in Path(skinny_kernels.__file__).parent.glob("*.py")]
    modules = [import_module(f"skinny_kernels.{name}") for name in names if name != "__init__"]
    found = {
        one for module in modules for one in vars(module).values() if type(one) is type(weighed)
    }
    named = [
        (one.__module__, one.__qualname__) for one in found if "<locals>" not in one.__qualname__
    ]
    assert len(named) > 20
    assert len(set(named)) == len(named)

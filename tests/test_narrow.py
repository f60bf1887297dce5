"""The faster way round for few rows gives the same products, and only inside its context."""

import threading

import pytest
import torch
from torch.nn import functional

from token_recycling import narrow
from token_recycling.narrow import GAINS, NarrowProducts, gains


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 7, 16, 17])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (), (2, 3)])
def test_the_products_are_the_same(rows, bias, shape):
    layer = torch.nn.Linear(24, 40, bias=bias)
    inputs = torch.randn(*shape, rows, 24)
    expected = layer(inputs)
    with torch.inference_mode(), NarrowProducts():
        found = layer(inputs)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found + 1e-3, expected, atol=1e-5)


def test_other_types_and_row_counts_go_the_ordinary_way(monkeypatch):
    calls = []
    monkeypatch.setattr(functional, "linear", functional.linear)  # put back at the end
    monkeypatch.setattr(narrow, "_linear", lambda *a: calls.append(a) or torch.zeros(1))
    with NarrowProducts():
        for dtype, rows in ((torch.bfloat16, 3), (torch.float64, 3), (torch.float32, 30)):
            functional.linear(torch.ones(rows, 8, dtype=dtype), torch.ones(5, 8, dtype=dtype))
        assert len(calls) == 3
        functional.linear(torch.ones(3, 8), torch.ones(5, 8))
        assert len(calls) == 3


def test_weights_with_a_linear_of_their_own_keep_it():
    """As torchao's quantised weights have."""
    asked = []

    class Quantised(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(function)
            return torch.zeros(3, 5)

    weight = torch.ones(5, 8).as_subclass(Quantised)
    with NarrowProducts():
        functional.linear(torch.ones(3, 8), weight)
        functional.linear(torch.ones(3, 8), torch.nn.Parameter(torch.ones(5, 8)))
    assert [function.__name__ for function in asked] == ["linear"]


def test_nested_and_concurrent_contexts_leave_the_ordinary_function():
    before = functional.linear
    ready, go = threading.Barrier(2), threading.Event()

    def other():
        with NarrowProducts():
            ready.wait()
            go.wait()

    thread = threading.Thread(target=other)
    thread.start()
    with NarrowProducts(), NarrowProducts():
        ready.wait()
    assert functional.linear is not before  # the other thread is still inside
    go.set()
    thread.join()
    assert functional.linear is before
    with pytest.raises(ZeroDivisionError), NarrowProducts():
        raise ZeroDivisionError
    assert functional.linear is before


def test_where_it_is_expected_to_gain():
    assert not gains(1, 10**9)
    assert gains(4, 1)
    assert not gains(8, 1)
    assert gains(8, 10**6)
    assert not gains(GAINS[-1][0] + 1, 10**9)

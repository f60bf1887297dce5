"""The faster way round for few rows gives the same products, and only where it is asked for."""

import copy
import threading

import pytest
import torch
from torch.nn import functional

from token_recycling.model import skinny_gemm
from token_recycling.model.skinny_gemm import GAINS, SkinnyGemm, gains


class Model(torch.nn.Module):
    def __init__(self, *shape, **options):
        super().__init__()
        self.layer = torch.nn.Linear(*shape, **options)

    def forward(self, inputs):
        return self.layer(inputs)


@pytest.fixture
def calls(monkeypatch):
    """Products that went the faster way round."""
    seen = []
    turned = skinny_gemm.turned
    monkeypatch.setattr(skinny_gemm, "turned", lambda *a: seen.append(a) or turned(*a))
    return seen


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 7, 16, 17])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (), (2, 3)])
def test_the_products_are_the_same(rows, bias, shape, calls):
    model = Model(24, 40, bias=bias)
    inputs = torch.randn(*shape, rows, 24)
    expected = model(inputs)
    with torch.inference_mode(), SkinnyGemm(model):
        found = model(inputs)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found + 1e-3, expected, atol=1e-5)
    assert len(calls) == gains(rows * (6 if shape == (2, 3) else 1), 24 * 40)


def test_other_types_and_row_counts_go_the_ordinary_way(calls):
    for dtype, rows in ((torch.bfloat16, 3), (torch.float64, 3), (torch.float32, 30)):
        model = Model(8, 5, dtype=dtype)
        with SkinnyGemm(model):
            model(torch.ones(rows, 8, dtype=dtype))
    assert not calls
    model = Model(8, 5)
    with SkinnyGemm(model):
        model(torch.ones(3, 8))
        assert len(calls) == 1
        with torch.autocast("cpu"):
            assert model(torch.ones(3, 8)).dtype == torch.bfloat16
    assert len(calls) == 1


def test_weights_with_a_linear_of_their_own_keep_it(calls):
    """As torchao's quantised weights have."""
    asked = []

    class Quantised(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(getattr(function, "__name__", ""))
            return torch.zeros(3, 5) if function is functional.linear else NotImplemented

    model = Model(8, 5, bias=False)
    products = SkinnyGemm(model)
    del model.layer.weight
    object.__setattr__(model.layer, "weight", torch.ones(5, 8).as_subclass(Quantised))
    with products:
        model(torch.ones(3, 8))
    assert "linear" in asked
    assert not calls


def test_other_threads_and_other_callers_get_the_ordinary_way(calls):
    model = Model(8, 5)
    products = SkinnyGemm(model)
    ready, go = threading.Barrier(2), threading.Event()

    def other():
        with SkinnyGemm(model):
            ready.wait()
            go.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    model(torch.ones(3, 8))
    assert not calls
    go.set()
    thread.join()
    with products, products:
        model(torch.ones(3, 8))
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError), products:
        raise ZeroDivisionError
    model(torch.ones(3, 8))
    assert len(calls) == 1


def test_nothing_of_torch_is_replaced(monkeypatch):
    """A patch that another library puts into ``functional.linear`` meanwhile stays, and is used."""
    model = Model(8, 5)
    with SkinnyGemm(model):
        monkeypatch.setattr(functional, "linear", lambda *a: "another library's")
        patched = functional.linear
    assert functional.linear is patched
    assert model(torch.ones(3, 8)) == "another library's"


def test_layers_that_somebody_else_has_changed_stay_so(calls):
    """As accelerate does to move inputs."""
    model = Model(8, 5)
    model.layer.forward = lambda inputs: "moved"
    with SkinnyGemm(model):
        assert model(torch.ones(3, 8)) == "moved"


def test_a_copy_of_the_model_has_ordinary_layers(calls):
    model = Model(8, 5)
    products = SkinnyGemm(model)
    twin = copy.deepcopy(model)
    with products:
        assert torch.equal(twin(torch.ones(3, 8)), functional.linear(
            torch.ones(3, 8), twin.layer.weight, twin.layer.bias))  # fmt: skip
        assert not calls
        with SkinnyGemm(twin):
            twin(torch.ones(3, 8))
    assert len(calls) == 1


def test_where_it_is_expected_to_gain():
    assert not gains(1, 10**9)
    assert gains(4, 1)
    assert not gains(8, 1)
    assert gains(8, 10**6)
    assert not gains(GAINS[-1][0] + 1, 10**9)

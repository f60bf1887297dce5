"""A model behaves outside our forwards as if nothing had been replaced."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch

from architectures import make
from token_recycling import TokenRecycling
from token_recycling.model.override import Override


@pytest.fixture
def model():
    model = make("llama")
    TokenRecycling(model)
    assert type(model.lm_head.__dict__["forward"]) is Override
    return model


HIDDEN = torch.randn(1, 3, 32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["lm_head", "model.norm", "model.layers.0.mlp"])
@pytest.mark.parametrize("how", ["script", "trace", "export", "strict export", "compile", "fx"])
@torch.inference_mode(False)
def test_layers_can_be_compiled(model, name, how):
    layer = model.get_submodule(name)
    wanted = layer(HIDDEN)
    if how == "script":
        if name.endswith("mlp"):
            pytest.skip("it cannot be scripted without us either")
        found = torch.jit.script(layer)(HIDDEN)
    elif how == "trace":
        found = torch.jit.trace(layer, HIDDEN)(HIDDEN)
    elif "export" in how:
        program = torch.export.export(layer, (HIDDEN,), strict=how == "strict export")
        found = program.module()(HIDDEN)
    elif how == "compile":
        found = torch.compile(layer, backend="eager", fullgraph=True)(HIDDEN)
    else:
        if name.endswith("norm"):
            pytest.skip("it cannot be traced without us either")
        found = torch.fx.symbolic_trace(layer)(HIDDEN)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_it_looks_like_the_method(model):
    layer, untouched = model.lm_head, make("llama").lm_head
    assert inspect.ismethod(layer.forward)
    assert inspect.signature(layer.forward) == inspect.signature(untouched.forward)
    assert inspect.getsource(layer.forward) == inspect.getsource(untouched.forward)
    assert layer.forward.__self__ is layer
    assert layer.forward.__func__ is torch.nn.Linear.forward


def test_a_forward_outlives_its_layer(model):
    """Somebody keeps the method, and the weights may change before the layer goes."""
    layer = model.lm_head
    forward, gone = layer.forward, weakref.ref(layer)
    layer.weight = torch.nn.Parameter(torch.ones_like(layer.weight))
    wanted = layer(HIDDEN)
    model.lm_head = None
    del layer
    assert gone() is None
    assert torch.equal(forward(HIDDEN), wanted)


def test_a_model_goes_at_once(model):
    """No cycle of references keeps it until the collector runs."""
    gone = weakref.ref(model.lm_head)
    gc.disable()
    try:
        model.lm_head = None
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(model, copied):
    layer = copied(model.lm_head)
    assert layer.forward.__self__ is layer
    assert torch.equal(layer(HIDDEN), model.lm_head(HIDDEN))

"""Weights that are adjacent in memory: the model's owner notices nothing, and products are joint.

Products are those of PyTorch, on a CPU; ``test_gpu_layers`` has the kernels around them.
"""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from architectures import make
from models import random_prompts
from skinny_kernels.gpu import adjacent
from skinny_kernels.gpu.adjacent import JointProduct, groups, joined
from skinny_kernels.shadow import shadow_of


@pytest.fixture
def moved():
    model = make("qwen2")  # with biases
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = dict(model.named_parameters())
    adjacent.move(model)
    assert all(one is objects[name] for name, one in model.named_parameters())
    return model, before


def products(model):
    return [JointProduct.of(layers) for layers in groups(model)]


def test_the_model_is_the_same_to_its_owner(moved, tmp_path):
    model, before = moved
    assert len(products(model)) == 2 * model.config.num_hidden_layers
    assert all(products(model))
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    ids = torch.tensor(random_prompts([9]))
    right = make("qwen2")
    right.load_state_dict(before)
    assert model(ids).logits.equal(right(ids).logits)
    # Files have every tensor once, and copies have memory of their own.
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert all(tensor.equal(before[name]) for name, tensor in again.state_dict().items())
    save_file(
        {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}, tmp_path / "a"
    )
    assert all(tensor.equal(before[name]) for name, tensor in load_file(tmp_path / "a").items())
    twin = copy.deepcopy(model)
    twin.model.layers[0].self_attn.q_proj.weight.data.zero_()
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_no_memory_is_used_twice(moved):
    model, _ = moved
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
                for one in model.parameters()}  # fmt: skip
    parameters = {id(one): one.nbytes for one in model.parameters()}
    assert sum(storages.values()) == sum(parameters.values())


def test_a_product_gives_the_outputs_of_its_layers(moved):
    model, _ = moved
    inputs = torch.randn(2, 3, model.config.hidden_size)
    for layers, product in zip(groups(model), products(model)):
        for number, layer in enumerate(layers):
            assert torch.allclose(product.output(number, inputs), layer(inputs), atol=1e-6)
        assert product._inputs is None  # nothing is kept
        other = inputs + 1
        assert torch.allclose(product.output(1, other), layers[1](other), atol=1e-6)


def test_what_the_owner_writes_is_used(moved):
    model, _ = moved
    layers = groups(model)[0]
    product = JointProduct.of(layers)
    inputs = torch.randn(1, 1, model.config.hidden_size)
    before = product.output(0, inputs)
    with torch.no_grad():
        layers[0].weight.mul_(2)
        layers[0].bias.mul_(2)
    assert torch.allclose(product.output(0, inputs), 2 * before, atol=1e-5)


@pytest.mark.parametrize("what", ["data", "module", "transposed", "given"])
def test_other_weights_are_multiplied_one_by_one(moved, what):
    """Where the owner has put something else, and in a model that was given to us."""
    model, _ = moved
    layer = model.model.layers[0].self_attn.k_proj
    if what == "data":
        layer.weight.data = layer.weight.data.clone()
    elif what == "module":
        model.model.layers[0].self_attn.k_proj = nn.Sequential(layer)  # as an adapter is
    elif what == "transposed":
        layer.weight.data = layer.weight.data.t().contiguous().t()
    else:
        model = make("qwen2")
        assert not any(products(model))
        return
    found = products(model)
    assert sum(one is None for one in found) == (what != "module")
    assert len(found) == 2 * model.config.num_hidden_layers - (what == "module")


def test_shared_and_different_weights_stay_where_they_are():
    model = make("qwen2")
    layers = model.model.layers
    layers[1].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight  # tied
    layers[0].mlp.up_proj.weight.data = layers[0].mlp.up_proj.weight.data.double()
    addresses = {name: one.data_ptr() for name, one in model.named_parameters()}
    adjacent.move(model)
    stay = {name for name, one in model.named_parameters() if one.data_ptr() == addresses[name]}
    assert "model.layers.0.self_attn.q_proj.weight" in stay
    assert "model.layers.1.self_attn.k_proj.weight" in stay
    assert "model.layers.0.mlp.gate_proj.weight" in stay
    assert "model.layers.1.mlp.gate_proj.weight" not in stay


def test_a_shadow_sees_that_weights_are_adjacent(moved):
    shadow = shadow_of(moved[0])
    assert all(products(shadow))
    weights = [layer.weight for layer in groups(shadow)[0]]
    assert joined(weights).equal(torch.cat([weight.data for weight in weights]))
    assert joined(weights[::-1]) is None

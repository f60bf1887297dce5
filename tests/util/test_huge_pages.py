"""Weights in huge pages."""

import pickle

import pytest
import torch
from torch import nn

from skinny_kernels import huge_pages
from token_recycling import load_checkpoint

GIVEN = "skinny_kernels.huge_pages"


@pytest.fixture(autouse=True)
def given(monkeypatch):
    """Let the system have huge pages: the advice to use them is then harmless in any case."""
    monkeypatch.setattr(f"{GIVEN}.has_huge_pages", lambda: True)
    monkeypatch.setattr(f"{GIVEN}._available", lambda: 2**40)


def addresses(model):
    return {name: one.data_ptr() for name, one in model.named_parameters(remove_duplicate=False)}


def layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.Linear(24, 40), nn.Linear(40, 24))
    model[2].weight = model[0].weight  # one parameter
    model.append(nn.Linear(40, 24))
    model[3].weight.data = model[0].weight.data  # two parameters, the same memory
    return model


def test_weights_move_into_one_piece_of_memory():
    model = layers()
    before = addresses(model)
    values = {name: one.clone() for name, one in model.state_dict().items()}
    huge_pages.move(model.parameters())
    after = addresses(model)
    assert all(before[name] != after[name] for name in before)
    assert after["0.weight"] == after["2.weight"] == after["3.weight"]
    assert len({*after.values()}) == len({*before.values()})
    assert min(after.values()) % huge_pages.HUGE == 0
    assert all(address % huge_pages.ALIGNED == 0 for address in after.values())
    assert max(after.values()) - min(after.values()) < 64 * 1024
    assert all(torch.equal(one, values[name]) for name, one in model.state_dict().items())


def test_a_pickled_weight_does_not_contain_the_others():
    model = layers()
    huge_pages.move(model.parameters())
    weight = model[0].weight.data
    written = pickle.dumps(weight)
    assert len(written) < weight.nbytes + 1000
    assert pickle.loads(written).equal(weight)


@pytest.mark.parametrize("lacks", ["memory", "pages"])
def test_weights_stay_where_something_is_missing(lacks, monkeypatch):
    if lacks == "memory":
        monkeypatch.setattr(f"{GIVEN}._available", lambda: 2**13)
    else:
        monkeypatch.setattr(f"{GIVEN}.has_huge_pages", lambda: False)
    model = layers()
    before = addresses(model)
    huge_pages.move(model.parameters())
    assert addresses(model) == before


def test_other_tensors_stay():
    transposed, empty = torch.ones(3, 4).t(), torch.ones(0)
    strange = torch.ones(4).as_subclass(type("Strange", (torch.Tensor,), {}))
    moved = torch.ones(4)
    tensors = [transposed, empty, strange, moved]
    before = [one.data_ptr() for one in tensors]
    huge_pages.move(tensors)
    assert [a == b.data_ptr() for a, b in zip(before, tensors)] == [True, True, True, False]


def test_the_memory_that_is_available_is_read(monkeypatch, tmp_path):
    monkeypatch.undo()
    file = tmp_path / "meminfo"
    monkeypatch.setattr(f"{GIVEN}.MEMORY", file)
    assert huge_pages._available() == 0
    file.write_text("MemTotal:  100 kB\nMemAvailable:   7 kB\n")
    assert huge_pages._available() == 7168


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_models_have_their_weights_there(dtype):
    model, _ = load_checkpoint(None, "cpu", dtype)
    places = [one.data_ptr() for one in model.parameters()]
    assert min(places) % huge_pages.HUGE == 0
    assert max(places) - min(places) < sum(one.nbytes for one in model.parameters()) + 2**16

"""The step of a GPU, in Triton's interpreter: how many kernels it launches around the forward.

``make test-device-kernels`` installs Triton, sets TRITON_INTERPRET=1, and runs the tests of
``test_graph.py`` with the same kernels.
"""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from architectures import make
from models import random_prompts
from token_recycling import TokenRecycling
from token_recycling.graph.step import GraphStep
from token_recycling.modes import ordinary_tensors
from token_recycling.sequence import Sequence

MOST_LAUNCHES = 20
NOT_LAUNCHED = ("empty", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view")


class Launches(TorchDispatchMode):
    """The operations that start a kernel on a GPU, outside the model's forward."""

    def __init__(self, model):
        super().__init__()
        self.model, self.names, self.inside = model, [], False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.name().split("::")[1].split(".")[0]
        if not (self.inside or function.is_view or name in NOT_LAUNCHED):
            self.names.append(name)
        return function(*arguments, **(keywords or {}))

    def count(self, step):
        """Count the operations of one step."""
        forward = self.model.forward

        def uncounted(*arguments, **keywords):
            self.inside = True
            try:
                return forward(*arguments, **keywords)
            finally:
                self.inside = False

        self.model.forward = uncounted
        try:
            with ordinary_tensors(), self:
                step()
        finally:
            del self.model.forward
        return self.names


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_launches_few_kernels_around_the_forward(architecture, batch):
    model = make(architecture)
    recycler = TokenRecycling(model, tree="ranked-15", graph=False)
    prompts = random_prompts([9, 5, 12][:batch])
    recycler.generate(prompts, max_new_tokens=3)
    step = GraphStep(recycler.target, recycler.drafter, batch, 256, 16)
    recycler.target.prefill([prompt[:-1] for prompt in prompts])
    with ordinary_tensors():
        step.begin([Sequence(prompt) for prompt in prompts], [])
    names = Launches(model).count(step)
    print(len(names), names)
    assert "device_propose" in names and "device_learn" in names
    assert len(names) <= MOST_LAUNCHES
    layers = model.config.get_text_config().num_hidden_layers
    assert layers > 1  # the commit must not launch kernels per layer

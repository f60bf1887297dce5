"""How many kernels a process compiles, and how long that takes.

Steps are interpreted, and what they launch is compiled afterwards.

``make test-device-kernels`` installs Triton and sets TRITON_INTERPRET=1.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from compiled_kernels import Recorded, pickled

from skinny_kernels import sdpa
from skinny_kernels.gpu import launch, layers
from skinny_kernels.modes import ordinary_tensors
from skinny_kernels.shadow import shadow_of
from token_recycling import TokenRecycling
from token_recycling.decoding.sequence import Sequence
from token_recycling.graph.step import GraphStep, StepSpec

MOST_KERNELS, MOST_SECONDS, LONGEST = 16, 30, 8
# Rows, size of a step and tokens of the prompts. What varies is odd, 1, and divisible by 16, as
# Triton makes a difference between these.
STEPS = [(1, 1, 33), (1, 2, 16), (1, 33, 7), (1, 48, 32), (1, 64, 33), (4, 1, 7), (4, 16, 48)]
STEPS += [(16, 1, 16), (16, 4, 3)]


CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
)


def recorded(monkeypatch):
    """What a model launches that reads prompts and takes steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    recycler = TokenRecycling(model, graph=False)
    target = recycler.target
    target.recordings = None
    target.shadow = shadow_of(model)
    launches = []
    run = launch.KernelLaunch.run

    def noting(self):
        launches.append(pickled(self.kernel, self.grid, self.args, self.options, self.coalesce))
        run(self)

    monkeypatch.setattr(launch.KernelLaunch, "run", noting)
    monkeypatch.setattr(sdpa.gpu, "is_here", lambda tensor: True)
    monkeypatch.setattr(sdpa.gpu, "is_right", lambda *about: True)
    monkeypatch.setattr(sdpa.cpu, "fits", lambda *tensors: False)
    layers.cover(target.shadow)
    for rows, size, length in STEPS:
        prompts = [[(7 * row + at) % 96 for at in range(length)] for row in range(rows)]
        target.prefill([prompt[:-1] for prompt in prompts])
        spec = StepSpec(rows, 512 if rows > 1 else 256, size, kernels=True, drafts="device")
        step = GraphStep(target, recycler.drafter, spec)
        with ordinary_tensors(), torch.no_grad():
            step.begin([Sequence(prompt) for prompt in prompts], [])
            step()
    return Recorded(CONFIG, model.dtype, recycler.drafter.k, launches)


def compiled(recorded, folder, what="main"):
    """What ``compiled_kernels`` prints about it, with an empty cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
    del environment["TRITON_INTERPRET"]
    tests = Path(__file__).parents[1]
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(tests), str(tests / "graph"), environment["PYTHONPATH"]]
    )
    script = f"import compiled_kernels; compiled_kernels.{what}()"
    process = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(recorded),
        capture_output=True,
        env=environment,
    )
    assert process.returncode == 0, process.stderr.decode()[-2000:]
    return process.stdout.decode().splitlines()


def test_all_steps_share_kernels_that_are_compiled_ahead(monkeypatch, tmp_path):
    found = json.loads(compiled(recorded(monkeypatch), tmp_path)[-1])
    print(found)
    assert set(found["used"]) == set(found["ahead"])  # nothing is compiled in vain
    assert found["all"] == found["ahead"]  # and nothing later
    assert sum(found["all"].values()) <= MOST_KERNELS
    assert sum(found["seconds"].values()) <= MOST_SECONDS
    assert max(found["seconds"].values()) <= LONGEST


def test_a_process_that_ends_does_not_wait_for_kernels(tmp_path):
    """It finishes those that are being compiled, and drops the others."""
    threads, waiting = map(
        int, compiled(Recorded(CONFIG, torch.float32, 12, []), tmp_path, "leave")
    )
    assert threads >= 1
    assert waiting >= 5
    assert len(list(tmp_path.rglob("*.cubin"))) <= MOST_KERNELS - waiting

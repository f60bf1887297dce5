"""Letting the pool of captured steps take a CPU for a GPU with Triton."""

from dataclasses import replace

from token_recycling.graph import pool
from token_recycling.graph.step import GraphStep


def on_the_host(target, drafter, spec, cache, matrix):
    """The step without kernels, as there are none for a CPU."""
    drafts = "host" if spec.drafts == "device" else spec.drafts
    return GraphStep(target, drafter, replace(spec, kernels=False, drafts=drafts), cache)


def on_a_gpu(monkeypatch, kernels, step=on_the_host):
    """Use these classes instead of ``StepKernels`` and ``GraphStep``."""
    monkeypatch.setattr(pool, "has_device_kernels", lambda device: True)
    monkeypatch.setattr(pool, "StepKernels", kernels)
    monkeypatch.setattr(pool.StepPool, "_device_matrix", lambda self, spec: None)
    monkeypatch.setattr(pool, "GraphStep", step)

"""Which version of Triton runs the kernels for GPUs."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from skinny_kernels.gpu import choice


@pytest.mark.parametrize(
    "version, runs",
    [(None, False), ("3.2.0", False), ("3.3.0+git1", True), ("3.10.0", True), ("4.0", True)],
)
def test_old_versions_do_not(version, runs, monkeypatch):
    triton = None
    if version is not None:
        triton = ModuleType("triton")
        triton.__version__, triton.__spec__ = version, ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    choice._installed.cache_clear()
    try:
        assert choice.has_device_kernels(torch.device("cuda")) == runs
        assert not choice.has_device_kernels(torch.device("mps"))
    finally:
        choice._installed.cache_clear()

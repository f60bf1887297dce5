"""Environment and fixtures shared by all tests."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import settings

# PyTorch reads it. Beside other programs, threads that wait in loops hold up all others.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
import torch

from token_recycling import TokenRecycling

SHARED = Path(__file__).parents[2] / "shared" / "data"
os.environ["HF_HUB_OFFLINE"] = "1"
# Ignore step costs of this machine.
os.environ["TOKEN_RECYCLING_CACHE"] = mkdtemp()
# Machines differ, and first calls compile.
settings.register_profile("token-recycling", deadline=None)
settings.load_profile("token-recycling")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
if "PYTEST_XDIST_WORKER" in os.environ:  # workers in parallel: one thread each
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
else:
    torch.set_num_threads(min(2, CORES))


@pytest.fixture(autouse=True)
def _quiet():
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*pad_token_id.*")


@pytest.fixture(scope="session")
def bundled():
    """The bundled model with a tree of fixed size; reset it before use."""
    return TokenRecycling.from_pretrained(device="cpu", nodes=16)


@pytest.fixture(scope="session")
def shared_data():
    if not SHARED.is_dir():
        pytest.skip(f"needs {SHARED}")
    return SHARED


@pytest.fixture(autouse=True, scope="session")
def no_line_says_what_takes_long():
    """On a slow machine it would be one line more on stderr than a test expects."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("token_recycling.cli.progress.PATIENCE", 600.0)
        yield

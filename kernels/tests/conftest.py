"""Environment of the tests of the kernels."""

import os

# PyTorch reads it. Beside other programs, threads that wait in loops hold up all others.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
import torch
from hypothesis import settings

# Machines differ, and first calls compile.
settings.register_profile("skinny-kernels", deadline=None)
settings.load_profile("skinny-kernels")
# Workers in parallel: one thread each.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

"""Machine code is kept, and made anew when the package has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import skinny_kernels

PACKAGE = Path(skinny_kernels.__file__).parent
KERNELS = """
from skinny_kernels import elementwise_kernel, norm_kernel
from skinny_kernels.machine_code import Kernel
from skinny_kernels.vectors import BFLOAT16, FLOAT32, processor

if processor().lanes:
    kernels = [(elementwise_kernel.add, FLOAT32), (elementwise_kernel.add, BFLOAT16)]
    addresses = {Kernel(*kernel).address for kernel in kernels}
    addresses.add(Kernel(norm_kernel.norm, FLOAT32, in_pieces=True).address)
    assert len(addresses) == 3
"""


def test_the_next_process_compiles_no_kernel(tmp_path):
    """The control: it compiles all of them if a file of the folder has changed."""
    cache = tmp_path / "cache"
    ignored = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(PACKAGE, tmp_path / "there" / "skinny_kernels", ignore=ignored)
    known = {**os.environ, "PYTHONPATH": str(copy.parent), "NUMBA_CACHE_DIR": str(cache)}

    def after_a_process():
        subprocess.run([sys.executable, "-c", KERNELS], env=known, check=True, cwd=copy.parent)
        return sorted(cache.rglob("*.nbc"))

    first = after_a_process()
    assert first
    assert after_a_process() == first
    with (copy / "tile.py").open("a") as file:
        file.write("# changed\n")
    assert len(after_a_process()) == 2 * len(first)

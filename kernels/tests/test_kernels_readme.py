"""The example of the README runs; its model is replaced by one that is here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[1]
MODEL = KERNELS.parent / "src" / "token_recycling" / "demo_model"


def test_the_example():
    if not MODEL.is_dir():
        pytest.skip("needs the bundled model of Token Recycling")
    (code,) = re.findall(r"```python\n(.*?)```", (KERNELS / "README.md").read_text("utf-8"), re.S)
    code = re.sub(r'name = ".*"', f"name = {str(MODEL)!r}", code)
    code += "\nassert fast is not model"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "The lighthouse keeper" in run.stdout

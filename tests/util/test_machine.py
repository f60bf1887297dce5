"""What is noted of the machine and the checkout."""

import subprocess
from pathlib import Path

import pytest
import torch

import token_recycling
from token_recycling.util import machine


def test_the_commit_is_that_of_the_checkout():
    ask = ["git", "-C", str(Path(token_recycling.__file__).parent), "rev-parse", "HEAD"]
    try:
        head = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout")
    assert machine.commit() == machine.describe(torch.device("cpu"))["commit"] == head


def test_another_repository_around_an_installed_package_is_not_it(tmp_path, monkeypatch):
    installed = tmp_path / "venv" / "token_recycling" / "util" / "machine.py"
    installed.parent.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(machine, "__file__", str(installed))
    assert machine.commit() == ""


def test_the_median_of_several_runs():
    calls = []
    assert machine.median_seconds(lambda: calls.append(1), torch.device("cpu"), rounds=3) >= 0
    assert len(calls) == 3

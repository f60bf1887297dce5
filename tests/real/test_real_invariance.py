"""Drafts change no bit of a real model's text in half precision."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import million

pytestmark = pytest.mark.real
TOKENS = 600  # a case has some hundred; more: lab/million.py


def test_no_token_differs(folder, shared_data, tmp_path):
    """One by one, in batches, in a chat and by the server's engine, with drafts of any size."""
    arguments = {
        "--text": shared_data / "books.txt.xz",
        "--out": tmp_path / "cases.jsonl",
        "--model": folder,
        "--dtype": "bfloat16",
        "--tokens": TOKENS,
    }
    result = CliRunner().invoke(
        million.app, ["run", *(str(part) for pair in arguments.items() for part in pair)]
    )
    assert result.exit_code == 0, result.output

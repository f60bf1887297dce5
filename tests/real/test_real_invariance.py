"""Drafts change no bit of a real model's text in half precision and with packed weights."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import million

pytestmark = pytest.mark.real
TOKENS = 1500


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_token_differs(dtype, folder, shared_data, tmp_path):
    """One by one, in batches, in a chat and by the server's engine, with drafts of any size."""
    arguments = {
        "--text": shared_data / "books.txt.xz",
        "--out": tmp_path / "cases.jsonl",
        "--model": folder,
        "--dtype": dtype,
        "--tokens": TOKENS,
    }
    result = CliRunner().invoke(
        million.app, ["run", *(str(part) for pair in arguments.items() for part in pair)]
    )
    assert result.exit_code == 0, result.output

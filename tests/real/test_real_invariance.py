"""Drafts change no bit of a real model's text in half precision."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import million

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    "real, dtype, tokens",  # 20,000 in all; a million: lab/million.py
    [
        (True, "bfloat16", 600),
        (False, "bfloat16", 8000),
        (False, "float16", 6000),
        (False, "float32", 5400),
    ],
)
def test_no_token_differs(folder, shared_data, tmp_path, real, dtype, tokens):
    """One by one, in batches, in a chat and by the server's engine, with drafts of any size."""
    arguments = {
        "--text": shared_data / "books.txt.xz",
        "--out": tmp_path / "cases.jsonl",
        "--dtype": dtype,
        "--tokens": tokens,
    }
    if real:
        arguments["--model"] = folder
    result = CliRunner().invoke(
        million.app, ["run", *(str(part) for pair in arguments.items() for part in pair)]
    )
    assert result.exit_code == 0, result.output

"""The public names, and what is said without the extra of the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import token_recycling
from token_recycling import TokenRecycling


def test_the_public_names():
    """Adding a name is a decision, and removing one breaks somebody's import."""
    assert token_recycling.__all__ == [
        "BUNDLED_MODEL",
        "AdjacencyMatrix",
        "Chunk",
        "DraftTree",
        "Drafter",
        "Generation",
        "PlainDecodingWarning",
        "Rows",
        "Stats",
        "Step",
        "TokenRecycling",
        "TokenRecyclingError",
        "TreeTemplate",
        "__version__",
        "enable",
    ]
    for name in token_recycling.__all__:
        assert getattr(token_recycling, name)


def test_an_unknown_option_is_named(bundled):
    with pytest.raises(TypeError, match=r"unknown option 'graphs'; choose from .*graph"):
        TokenRecycling(bundled.model, graphs=True)


def run(code):
    """Run Python code in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


WITHOUT = "import sys\nfor name in ('typer', 'rich'): sys.modules[name] = None\n"


@pytest.mark.slow
def test_the_library_needs_no_extra():
    code = (
        "from token_recycling import TokenRecycling\n"
        "answer = TokenRecycling.from_pretrained().generate('Once', max_new_tokens=4)\n"
        "print(len(answer.token_ids))"
    )
    done = run(WITHOUT + code)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_the_command_line_without_its_extra_is_one_clear_line():
    done = run(f"{WITHOUT}from token_recycling.cli import main\nmain(['demo'])")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: the command line needs typer: pip install 'token-recycling[cli]'\n"
    )


def test_a_module_that_is_missing_for_another_reason_is_no_missing_extra():
    code = "import sys\nsys.modules['token_recycling.cli.app'] = None\n"
    done = run(f"{code}from token_recycling.cli import main\nmain(['demo'])")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr

"""The public names, and what is said without the extra of the command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

import token_recycling
from token_recycling import CallOptions, Options, TokenRecycling, TokenRecyclingError, enable
from token_recycling.hf.call import GenerateArguments
from token_recycling.options import OptionArguments


def test_a_notebook_completes_the_public_names():
    assert {"TokenRecycling", "enable", "fetch_model"} <= set(dir(token_recycling))


def test_the_public_names():
    """Adding a name is a decision, and removing one breaks somebody's import."""
    assert token_recycling.__all__ == [
        "BUNDLED_MODEL",
        "AdjacencyMatrix",
        "CallOptions",
        "Chunk",
        "DraftTree",
        "Drafter",
        "DrafterState",
        "Generation",
        "Options",
        "PlainDecodingWarning",
        "Stats",
        "Step",
        "TokenRecycling",
        "TokenRecyclingError",
        "TreeTemplate",
        "__version__",
        "enable",
        "fetch_model",
        "load_checkpoint",
    ]
    for name in token_recycling.__all__:
        assert getattr(token_recycling, name)


def test_an_unknown_option_is_named(bundled):
    with pytest.raises(
        TokenRecyclingError, match=r"^there is no option graphs; did you mean graph"
    ):
        TokenRecycling(bundled.model, graphs=True)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("max_tokens", "max_new_tokens"), ("temprature", "temperature"), ("stops", "stop")],
)
def test_a_misspelt_argument_gets_one_short_line(bundled, given, meant):
    with pytest.raises(TokenRecyclingError) as caught:
        bundled.generate("Once", **{given: 1})
    assert str(caught.value) == f"there is no option {given}; did you mean {meant}?"
    with pytest.raises(TokenRecyclingError, match=r"^there is no option zzz$"):
        bundled.stream("Once", zzz=1)


def test_a_misspelt_option_is_not_blamed_on_the_model():
    with pytest.raises(TokenRecyclingError, match=r"^there is no option draftr; did you"):
        TokenRecycling.from_pretrained(draftr="paper")


def test_types_know_every_option():
    assert set(OptionArguments.__annotations__) == set(Options.names())
    assert {one.name for one in fields(CallOptions)} < set(GenerateArguments.__annotations__)


def test_representations_say_what_matters(bundled):
    bundled.reset()
    answer = bundled.generate("Once", max_new_tokens=5)
    assert repr(answer).startswith("<Generation '")
    assert "5 tokens, length, MAT" in repr(answer)
    assert "drafter='adaptive', 16 nodes, batch-invariant, MAT" in repr(bundled)
    with enable(bundled.model, nodes=4) as enabled:
        assert repr(enabled).startswith("<Enabled: <TokenRecycling of LlamaForCausalLM: ")
    assert repr(enabled).startswith("<Disabled: ")


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

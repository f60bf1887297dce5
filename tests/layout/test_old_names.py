"""What was renamed in public still works, with one warning that names the new name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings

import pytest

import token_recycling
from token_recycling import TokenRecycling, TokenRecyclingError, TreeTemplate, _moved, enable
from token_recycling.cli import main


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


@pytest.mark.parametrize("old", sorted(_moved.MOVED))
def test_every_moved_module_is_importable(old):
    sys.modules.pop(f"token_recycling.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"token_recycling.{old} is now") as caught:
        module = importlib.import_module(f"token_recycling.{old}")
    assert len([w for w in caught if w.category is DeprecationWarning]) == 1
    now = importlib.import_module(f"token_recycling.{_moved.MOVED[old]}")
    assert {name for name in vars(now) if name[0] != "_"} <= set(vars(module))


def test_what_is_imported_by_an_old_name_is_the_same_object():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from token_recycling.adjacency import AdjacencyMatrix
        from token_recycling.api import Generation
        from token_recycling.api import TokenRecycling as Old
    assert Old is TokenRecycling
    assert AdjacencyMatrix is token_recycling.AdjacencyMatrix
    assert Generation is token_recycling.Generation


def test_other_modules_are_still_missing():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("token_recycling.nothing")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"engine": "fused"}, {"graph": True}),
        ({"engine": "readable"}, {"graph": False}),
        ({"engine": "auto"}, {"graph": None}),
        ({"exact_logits": True}, {"float32_logits": True}),
    ],
)
def test_old_options(bundled, old, new):
    (name,), ((option, value),) = old, new.items()
    with pytest.warns(DeprecationWarning, match=f"option {name} is now {option}") as caught:
        recycler = TokenRecycling(bundled.model, **old)
    assert len([w for w in caught if w.category is DeprecationWarning]) == 1
    assert getattr(recycler.options, option) == value
    with pytest.warns(DeprecationWarning, match=name), enable(bundled.model, **old) as enabled:
        assert getattr(enabled.recycler.options, option) == value
    with pytest.warns(DeprecationWarning, match=name):
        assert getattr(TokenRecycling.from_pretrained(**old).options, option) == value


def test_a_wrong_value_of_an_old_option(bundled):
    with (
        pytest.warns(DeprecationWarning, match="engine"),
        pytest.raises(TokenRecyclingError, match="engine is 'fast'; set graph"),
    ):
        TokenRecycling(bundled.model, engine="fast")


def test_an_unknown_option_is_named(bundled):
    with pytest.raises(TypeError, match=r"unknown option 'graphs'; choose from .*graph"):
        TokenRecycling(bundled.model, graphs=True)


def test_the_old_option_of_the_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "-p", "Once", "--raw", "-n", "3", "--exact-logits"])
    assert ended.value.code == 0
    assert "--exact-logits is now --float32-logits" in capsys.readouterr().err


def test_the_old_key_of_tree_files(tmp_path):
    paths, acceptance = [[0], [1], [0, 0]], [0.6, 0.2, 0.3]
    files = []
    for key in ("shares", "acceptance"):
        files.append(tmp_path / f"{key}.json")
        tree = {"name": "mine", "paths": paths, key: acceptance}
        files[-1].write_text(json.dumps(tree), "utf-8")
    old, new = map(TreeTemplate.load, files)
    assert old == new
    assert old.acceptance == (0.6, 0.3, 0.2)


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

"""Functions take few arguments; more of them belong together and get a name."""

import ast
from pathlib import Path

import skinny_kernels

PACKAGE = Path(skinny_kernels.__file__).parent
MOST = 12


def with_many(source):
    """Names of the functions that take more than ``MOST`` arguments."""
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return [
        node.name
        for node in found
        if len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) > MOST
    ]


def test_no_function_takes_many_arguments():
    files = sorted(PACKAGE.glob("*.py"))
    assert files
    assert [(file.name, name) for file in files for name in with_many(file.read_text())] == []


def test_many_arguments_are_found():
    """The control."""
    some = ", ".join(f"a{n}" for n in range(MOST))
    assert with_many(f"def f({some}): pass") == []
    assert with_many(f"def f({some}, *, b): pass") == ["f"]

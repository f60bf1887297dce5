"""Imports within the package: no circle, and none from a lower package to a higher one."""

from __future__ import annotations

import ast
import shutil
from collections import Counter
from pathlib import Path

import pytest

import skinny_kernels
import token_recycling

PACKAGE = Path(token_recycling.__file__).parent
KERNELS = Path(skinny_kernels.__file__).parent
# What the kernels offer; everything else of theirs is their own affair.
OFFERED = {
    "attention",
    "batch_invariance",
    "compiled",
    "cores",
    "elementwise",
    "errors",
    "gguf_file",
    "gguf_model",
    "gpu/adjacent",
    "gpu/attention",
    "gpu/attention_launch",
    "gpu/cache_kernel",
    "gpu/choice",
    "gpu/elementwise_kernel",
    "gpu/launch",
    "gpu/layers",
    "gpu/usable",
    "gpu/vector",
    "huge_pages",
    "known_forms",
    "layers",
    "linear",
    "modes",
    "packed",
    "recordings",
    "replay",
    "sdpa",
    "shadow",
    "windows",
}
# From the bottom to the top: a file may import files of its own package and of packages further up
# in this list. A name with a slash is a folder, others are modules outside all folders.
PACKAGES = (
    ("errors", "version", "defaults"),
    ("util/",),
    ("drafting/",),
    ("options",),
    ("model/",),
    ("decoding/",),
    ("graph/",),
    ("hf/",),
    ("checkpoint/",),
    ("session", "recycler"),
    ("integrations/",),
    ("server/",),
    ("bench/",),
    ("cli/",),
)
MOST_FLAT = 6


def module_of(file: Path, package: Path) -> str:
    parts = file.relative_to(package).with_suffix("").parts
    return "/".join(parts[:-1] if parts[-1] == "__init__" else parts) or "."


class Imports(ast.NodeVisitor):
    """Collects what a file imports of a package, in functions and for type checkers too."""

    def __init__(self, modules: set[str], package: str) -> None:
        self.modules, self.package, self.found = modules, package, set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert not node.level, "imports are absolute"
        for alias in node.names:
            if not self._add(f"{node.module}.{alias.name}"):
                self._add(str(node.module))

    def _add(self, name: str) -> bool:
        root, _, rest = name.partition(".")
        module = rest.replace(".", "/") or "."
        known = root == self.package and module in self.modules
        if known:
            self.found.add(module)
        return known


def graph(package: Path, of: Path | None = None) -> dict[str, set[str]]:
    """Module -> the modules that it imports, of the same package or of another one."""
    files = {module_of(file, package): file for file in package.rglob("*.py")}
    others = of or package
    known = {module_of(file, others) for file in others.rglob("*.py")}
    name = "skinny_kernels" if others == KERNELS else "token_recycling"
    edges = {}
    for module, file in files.items():
        imports = Imports(known, name)
        imports.visit(ast.parse(file.read_text("utf-8")))
        edges[module] = imports.found - {module}
    return edges


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other, however indirectly."""

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for module in edges[waiting.pop()] - seen:
                seen.add(module)
                waiting.append(module)
        return seen

    reach = {module: reached(module) for module in edges}
    found = []
    for module in sorted(edges):
        circle = {other for other in reach[module] if module in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def level(module: str) -> int:
    for index, packages in enumerate(PACKAGES):
        for package in packages:
            if module == package or f"{module}/".startswith(
                package if package[-1] == "/" else f"{package}//"
            ):
                return index
    raise AssertionError(f"{module} belongs to no package")


def climbing(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of a module in a higher package."""
    package = {"."}
    return [
        (module, other)
        for module, others in edges.items()
        for other in others
        if not {module, other} & package and level(other) > level(module)
    ]


def names_of_classes(package: Path) -> Counter[str]:
    """Public classes at the top of all files, by name."""
    trees = (ast.parse(file.read_text("utf-8")) for file in package.rglob("*.py"))
    found = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return Counter(node.name for node in found if node.name[0] != "_")


def test_few_modules_are_in_no_package():
    flat = [file.stem for file in PACKAGE.glob("*.py") if file.stem != "__init__"]
    assert len(flat) <= MOST_FLAT


def test_no_class_name_stands_for_two_things():
    twice = [name for name, count in names_of_classes(PACKAGE).items() if count > 1]
    assert twice == []


def test_no_circle():
    assert circles(graph(PACKAGE)) == []


def test_no_import_from_a_lower_package_to_a_higher_one():
    assert climbing(graph(PACKAGE)) == []


def test_the_kernels_have_no_circle_and_know_nothing_of_this_package():
    assert circles(graph(KERNELS)) == []
    assert not any("token_recycling" in file.read_text("utf-8") for file in KERNELS.rglob("*.py"))


def test_nothing_behind_what_the_kernels_offer_is_used():
    used = set().union(*graph(PACKAGE, of=KERNELS).values())
    assert used == OFFERED


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(
        PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("demo_model", "__pycache__")
    )


@pytest.mark.parametrize(
    "line",
    [
        "from token_recycling.recycler import TokenRecycling",
        "def later():\n    from token_recycling import recycler",
        "import token_recycling.recycler",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import token_recycling.recycler",
    ],
)
def test_a_circle_and_an_import_upwards_are_found(copy, line):
    """The negative control: a draft imports ``recycler``, which imports it."""
    file = copy / "drafting/draft.py"
    file.write_text(f"{file.read_text('utf-8')}\n{line}\n", "utf-8")
    assert any({"drafting/draft", "recycler"} <= circle for circle in circles(graph(copy)))
    assert ("drafting/draft", "recycler") in climbing(graph(copy))


def test_a_class_name_that_is_used_twice_is_found(copy):
    (copy / "util/other.py").write_text("class DraftTree:\n    pass\n", "utf-8")
    assert names_of_classes(copy)["DraftTree"] == 2

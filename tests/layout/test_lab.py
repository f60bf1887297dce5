"""Every script of the lab says what it makes, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAB = ROOT / "lab"
ROW = re.compile(r"^\| `([\w/]+\.(?:py|sh))` \| (.+) \|$", re.MULTILINE)


def test_the_table_of_the_lab_has_every_script():
    scripts = {
        str(path.relative_to(LAB))
        for path in LAB.rglob("*")
        if path.suffix in (".py", ".sh") and path.name not in ("__init__.py", "script.py")
    }
    rows = [name for name, _ in ROW.findall((LAB / "README.md").read_text("utf-8"))]
    assert sorted(rows) == sorted(scripts)


def test_what_the_rows_name_is_there():
    rows = dict(ROW.findall((LAB / "README.md").read_text("utf-8")))
    made = (ROOT / "Makefile").read_text("utf-8")
    for name, text in rows.items():
        for page in re.findall(r"docs/\w+\.md", text):
            assert (ROOT / page).exists(), (name, page)
            if page != "docs/results.md":
                assert f"lab/{name}" in (ROOT / page).read_text("utf-8"), (name, page)
        for target in re.findall(r"`make ([\w-]+)`", text):
            assert f"\n{target}:" in made, (name, target)
        for other in re.findall(r"`(\w+\.(?:py|sh))`", text):
            assert (LAB / other).exists(), (name, other)


def test_the_commands_of_the_documents_are_scripts():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    pages += [*(ROOT / "docs").glob("*.md"), ROOT / "kernels" / "README.md"]
    for page in pages:
        for name in re.findall(r"\blab/([\w/]+\.(?:py|sh))", page.read_text("utf-8")):
            assert (LAB / name).exists(), (page.name, name)


def test_scripts_that_run_from_a_checkout_find_both_packages():
    """On a machine without a network nothing is installed."""
    paths = [
        found.split(":")
        for script in LAB.glob("*.sh")
        for found in re.findall(r"PYTHONPATH=(\S+)", script.read_text("utf-8"))
    ]
    checkouts = [set(found) for found in paths if "src" in found]
    assert len(checkouts) == 2
    for found in checkouts:
        assert {"src", "kernels/src"} <= found
    assert (ROOT / "src/token_recycling").is_dir()
    assert (ROOT / "kernels/src/skinny_kernels").is_dir()

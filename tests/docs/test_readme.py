"""The README's commands run, and its Python example too."""

import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest

import token_recycling
from command import call
from token_recycling import BUNDLED_MODEL
from token_recycling.hf.prepare import REFUSED

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("run_examples", ROOT / "tests/docs/run_examples.py")
run_examples = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run_examples)
README = (ROOT / "README.md").read_text()
BLOCKS = [(block.language, block.text) for block in run_examples.blocks(ROOT / "README.md")]
COMMANDS = [
    line
    for kind, block in BLOCKS
    if kind == "sh"
    for line in run_examples.commands(block)
    if line.startswith("token-recycling ")
    and not line.startswith("token-recycling serve")  # never ends: tests/server
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_there_are_commands_and_an_example():
    assert len(COMMANDS) >= 5
    assert "make demo" in README
    assert "make test" in README
    assert any(kind == "python" for kind, _ in BLOCKS)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme(line, tmp_path, monkeypatch):
    # Nothing is fetched here: the bundled model instead of the one that another command fetches.
    command = shlex.split(line.replace("$MODEL", str(BUNDLED_MODEL)), comments=True)
    assert command[0] == "token-recycling"
    # each command runs where the ones before it may have left a file
    folder = tmp_path.parent / "readme"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n/quit\n"))
    result, _, err = call(*command[1:])
    assert result == 0, err


def test_the_python_examples(monkeypatch, capsys):
    # There may be no network: the bundled model instead of the one that is fetched.
    monkeypatch.setattr(token_recycling, "fetch_model", lambda: BUNDLED_MODEL, raising=False)
    for kind, block in BLOCKS:
        if kind == "python":
            exec(compile(block, "README.md", "exec"), {})
            assert "tokens per forward pass" in capsys.readouterr().out


def test_a_command_may_have_several_lines():
    text = "a 'b  # no comment\nc' d  # a comment\n# another\n\ne \\\n  f\n"
    assert list(run_examples.commands(text)) == [
        "a 'b  # no comment\nc' d  # a comment",
        "e \\\n  f",
    ]


def test_what_is_not_run_is_named():
    """``run_examples.py`` runs everything else; what it skips needs what it has not."""
    for page in PAGES:
        for block in run_examples.wanted(page):
            for command in run_examples.commands(block.text) if block.language == "sh" else ():
                word = command.split()[0]
                runs = word in ("token-recycling", "make", "curl") or word.startswith("MODEL=")
                assert runs or run_examples.skipped(command), (page.name, command)


def test_the_first_screen_is_short():
    assert README.count("\n") < 130


def test_the_table_of_packages_has_every_room_and_no_other():
    text = (ROOT / "docs/architecture.md").read_text("utf-8").split("## Packages")[1]
    named = set(re.findall(r"`(\w+/|\w+\.py)`", "".join(re.findall(r"^\| (.*?) \|", text, re.M))))
    package = ROOT / "src/token_recycling"
    packages = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    flat = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert named - {"demo_model/"} == packages | flat


def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in headings}


def test_links_between_documents():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "lab").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page.name, link)
            assert not anchor or anchor in anchors(target), (page.name, link)


def test_the_results_are_those_of_the_summaries():
    """docs/results.md is what the tool writes from lab/results."""
    from write_results import render

    assert (ROOT / "docs/results.md").read_text("utf-8") == render()


def test_every_figure_has_its_command():
    """Each section with measured figures names the command that produced them."""
    for section in re.split(r"^## ", README, flags=re.MULTILINE):
        if re.search(r"tokens/s|MAT \d|\d\.\d+[x×]", section):
            assert re.search(r"`make \w+|make demo|lab/\w+\.py|token-recycling \w+", section), (
                section[:80]
            )


def test_the_table_of_arguments_has_all_that_are_refused():
    page = (ROOT / "docs" / "transformers.md").read_text("utf-8")
    table = page.partition("## Arguments under other names")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)[1:]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(REFUSED)

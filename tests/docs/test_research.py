"""The commands of docs/research.md, with the bundled model, few questions and short answers."""

from __future__ import annotations

import json
import shlex

import pytest
from test_readme import ROOT, run_examples

from command import call, write_suite
from token_recycling import BUNDLED_MODEL
from token_recycling.bench import plots
from token_recycling.bench.suites import Question

PAGE = ROOT / "docs" / "research.md"
COMMANDS = [
    line
    for block in run_examples.blocks(PAGE)
    if block.language == "sh"
    for line in run_examples.commands(block.text)
    if line.startswith("token-recycling")
]
QUESTIONS = [
    Question("own", str(i), f"kind {i}", "k", (text,))
    for i, text in enumerate(("How many legs have 3 cats?", "The king had a red hat."))
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What the commands printed, and the folder in which they ran one after another."""
    folder, printed = tmp_path_factory.mktemp("research"), {}
    suite = write_suite(folder / "own.jsonl", QUESTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in COMMANDS:
            line = line.replace("$MODEL", str(BUNDLED_MODEL)).replace("\\\n", " ")
            words = shlex.split(line, comments=True)[1:]
            if words[1] != "compare":
                words += ["--suite", suite, "-n", 16, "--threads", 1]
            code, out, err = call(*words)
            assert code == 0, f"{line}: {err}"
            printed[line] = out
    return folder, printed


def test_there_are_commands():
    assert len(COMMANDS) == 4
    assert sum("bench compare" in line for line in COMMANDS) == 2


def test_the_commands_run(outcome):
    _, printed = outcome
    assert all(printed.values())


def test_the_ablation_has_its_table_and_its_plots(outcome):
    folder, _ = outcome
    summary = json.loads((folder / "ablation" / "summary.json").read_text())
    names = list(summary["decoders"])
    assert len(names) == 2 + 2 * 5 + 2 * 3
    by_k, by_nodes = (plots.curves(summary, setting) for setting in ("k", "nodes"))
    assert [k for k, _ in by_k["paper:nodes=80:cold=yes"]] == [1, 2, 4, 8, 12]
    assert [nodes for nodes, _ in by_nodes["paper:k=8:cold=no"]] == [10, 20, 40, 80]
    report = (folder / "ablation" / "report.html").read_text()
    for title in ("MAT by k", "Speedup by k", "MAT by nodes", "Filling of the matrix"):
        assert f">{title}<" in report
    table = (folder / "ablation" / "tables.md").read_text()
    assert all(name in table for name in names)
    assert {entry["overall"]["identical"] for entry in summary["decoders"].values()} == {1}
    sizes = [
        summary["decoders"][name]["overall"]["size"] for _, name in by_k["paper:nodes=80:cold=no"]
    ]
    assert sizes[0] < sizes[1] < sizes[3]  # more candidates, more nodes


def test_every_setting_is_on_the_page():
    from token_recycling.bench.variants import SETTINGS

    page = PAGE.read_text("utf-8")
    assert all(f"| `{name}` |" in page for name in SETTINGS)

"""Counting the tokens that drafts change."""

import json
import lzma

import pytest
from typer.testing import CliRunner

import million
from conformance import scale_products
from token_recycling.bench.suites import load


@pytest.fixture
def files(tmp_path):
    text, out = tmp_path / "text.xz", tmp_path / "out.jsonl"
    words = " ".join(one.turns[0] for one in load("builtin"))
    text.write_bytes(lzma.compress(words.encode() * 20))
    return text, out


def run(files, tokens):
    text, out = files
    arguments = ["run", "--text", text, "--out", out, "--dtype", "bfloat16", "--tokens", tokens]
    return CliRunner().invoke(million.app, list(map(str, arguments)))


def test_no_token_differs_and_a_run_goes_on(files):
    lines = []
    for tokens in (100, 700):
        assert run(files, tokens).exit_code == 0
        lines.append([json.loads(line) for line in files[1].read_text().splitlines()])
    assert lines[1][: len(lines[0])] == lines[0]
    assert [line["case"] for line in lines[1]] == list(range(len(lines[1])))
    assert {line["kind"] for line in lines[1][:4]} <= set(million.KINDS)
    assert not any(line["differing"] for line in lines[1])


def test_differing_tokens_are_counted(files, monkeypatch):
    scale_products(monkeypatch, 1.01)
    result = run(files, 600)
    assert result.exit_code == 1
    assert " 0 differ" not in result.output.splitlines()[0]


def test_what_counts_as_differing():
    assert million.differing([[1, 2, 3], [4]], [[1, 2, 3], [4]]) == 0
    assert million.differing([[1, 2, 3], [4]], [[1, 9, 3], [4, 5]]) == 3

"""The conformance page: its rows, and a few of them examined anew. `make test-models` does all."""

import re
from pathlib import Path

import pytest

from architectures import ARCHITECTURES
from conformance import examine
from token_recycling.model.kv_cache import RecyclingCache

PAGE = Path(__file__).parents[2] / "docs/models.md"
# one of every kind that goes wrong without care
SOME = [
    "deepseek_v3",
    "gemma2",
    "gemma3n",
    "gemma4",
    "gpt_oss",
    "olmo3",
    "roberta",
    "qwen2, window",
    "bloom",
    "doge, sparse",
    "jamba",
    "llama4, scaled",
    "recurrent_gemma",
    "rwkv",
]


@pytest.mark.parametrize("name", SOME)
def test_an_architecture_is_as_the_table_says(name):
    assert examine(name).problems == []


def test_the_page_names_each_and_none_is_bad():
    tables = PAGE.read_text("utf-8").split("| not supported")
    for table, supported in zip(tables, (True, False), strict=True):
        cells = re.findall(r"^\| .*? \| (.+) \|$", table, flags=re.MULTILINE)
        named = {name for cell in cells for name in cell.split(" · ")} - {" "}
        assert named == {n for n, row in ARCHITECTURES.items() if row.supported is supported}
        assert "**" not in table  # what is not as expected is bold
    assert sum(row.supported for row in ARCHITECTURES.values()) >= 45


def test_a_broken_commit_is_reported(monkeypatch):
    """The negative control of the examination itself."""

    def forgetful(self, path, counts):
        self.lengths = [n + more for n, more in zip(self.lengths, counts, strict=True)]

    import conformance

    strict = conformance.TokenRecycling

    def after_the_probe(*arguments, **options):
        recycler = strict(*arguments, **options)
        monkeypatch.setattr(RecyclingCache, "commit", forgetful)
        return recycler

    monkeypatch.setattr(conformance, "TokenRecycling", after_the_probe)
    assert "greedy failed" in examine("llama").problems

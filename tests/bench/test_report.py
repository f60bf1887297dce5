import re
from html.parser import HTMLParser

import pytest

from token_recycling import TokenRecyclingError
from token_recycling.bench import report, tables

KINDS = ["mt_bench", "translation", "math"]
SECTIONS = [
    "All decoders",
    "Speedup by kind of prompt",
    "Plots",
    "Accepted tokens and time by phase",
    "Spec-Bench's own aggregate",
    "Slower than the baseline",
    "A sample",
    "How it was measured",
]


def measures(speedup, drafts=True):
    return {
        "questions": 40,
        "tokens": 4000,
        "tokens_per_second": 40 * speedup,
        "speedup": speedup,
        "speedup_interval": [0.9 * speedup, 1.1 * speedup],
        "speedup_quartiles": [0.8 * speedup, speedup, 1.2 * speedup],
        "slower_than_baseline": 3,
        "mat": 1.5 * speedup,
        "forwards": 900,
        "step_seconds": 0.02,
        "accepted_per_depth": [0.6, 0.3, 0.1] if drafts else [],
        "size": 8.0 if drafts else None,
        "identical": 1.0,
        "ttft_seconds": 0.125,
        "c": 1.5,
        "phases": dict(draft=0.05, verify=0.85, accept=0.05, observe=0.04, commit=0.01)
        if drafts
        else None,
    }


def decoder(speedup, drafter="paper", kinds=KINDS):
    return {
        "about": {
            "drafter": drafter,
            "tree": None,
            "k": drafter and 8,
        },
        "step_costs": [[1, 0.01, 9], [8, 0.02, 40], [9, 0.03, 1]] if drafter else [],
        "overall": measures(speedup, bool(drafter)),
        "kinds": {kind: measures(speedup, bool(drafter)) for kind in kinds},
        "rounds": [speedup, speedup],
        "spread": 0.02,
        "spec_bench": {"tokens_per_second": 44 * speedup, "speedup": speedup, "mat": 1.5},
        "peak_memory_bytes": 3 << 30,
        "matrix_bytes": 196608 if drafter else None,
    }


def example(kinds=KINDS, **decoders):
    """A whole summary: the baseline and ``decoders``, given by their speedups."""
    speedups = decoders or {"prompt-lookup": 1.1, "paper": 0.8, "auto": 1.9}
    names = {n: decoder(s, "prompt-lookup" if "-l" in n else "paper") for n, s in speedups.items()}
    return {
        "format": "token-recycling-bench-2",
        "reference": "generate",
        "date": "2025-06-01T12:00:00+00:00",
        "baseline": "generate",
        "machine": {"cpu": "A CPU", "device": "cpu", "cores": 2, "memory_bytes": 8 << 30}
        | {"commit": "c0ffee", "command": "token-recycling bench --rounds 2"}
        | {"device_name": "A CPU", "threads": 2, "torch": "2.13.0", "transformers": "5.23.0"},
        "model": {"name": "tiny", "parameters": 134_515_008, "dtype": "float32", "note": "widened"}
        | {"vocab_size": 100},
        "settings": {"suites": ["builtin"], "max_new_tokens": 80, "rounds": 2, "temperature": 0.0},
        "kinds": kinds,
        "decoders": {"generate": decoder(1.0, None, kinds), **names},
        "losing": [
            {"name": f"builtin/{i}", "kind": "math", "decoder": "paper", "speedup": 0.7 + i / 100}
            | {"mat": 1.1, "tokens": 80, "prompt": "How many"}
            for i in range(20)
        ],
        "sample": {
            "name": "builtin/3",
            "decoder": "auto",
            "prompt": "Count.",
            "pieces": [["One", False], [" two", True], [" three", True], [" four", False]],
        },
        "per_question": {
            name: [{"matrix_rows_before": rows} for rows in (0, 20, 30)] for name in names
        },
        "left_out": [],
        "repeating": [],
        "asked": 6,
        "questions": [
            {"suite": "builtin", "id": i, "kind": kinds[i % len(kinds)], "name": f"builtin/{i}"}
            for i in range(6)
        ],
    }


class Reader(HTMLParser):
    """Checks that all elements are closed in turn, and gathers what a test asks for."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
        self.note(attributes)

    def handle_startendtag(self, tag, attributes):
        self.note(attributes)

    def note(self, attributes):
        for key, value in attributes:
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href", "action", "data", "srcset", "poster"):
                self.links.append(value)
            self.links += re.findall(r"url\((.*?)\)", value or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(summary):
    """Render; return the HTML, which is well-formed, and its text."""
    html = report.render(summary)
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open
    assert len(set(reader.ids)) == len(reader.ids)
    assert all(link.startswith("#") and link[1:] in reader.ids for link in reader.links)
    assert "nan" not in html
    return html, " ".join("".join(reader.text).split())


@pytest.fixture(scope="module")
def whole():
    """A whole summary, read."""
    return read(example())


def test_complete(whole):
    summary = example()
    html, text = whole
    assert html.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert re.findall("<h2>(.*?)</h2>", html) == SECTIONS
    for name in summary["decoders"]:
        assert f'<th scope="row"><span>{name}</span></th>' in html
    for kind in KINDS:
        assert f'<th scope="row"><span>{kind}</span></th>' in html
    for said in (
        "tiny: The default (auto) decodes 1.90 times as fast as generate (median of 40 questions; "
        "quartiles 1.52 and 2.28; 95 % interval 1.71 to 2.09). It is slower on 3 of them",
        "tiny, widened: 134.5 M parameters, float32; A CPU, 2 threads; torch 2.13.0",
        "0.80x",
        "125 ms",
        "0.2 MiB",
        "8192.0 MiB",
        "Show 8 more",
        "builtin/19",
        "All 6 prompts by name",
        "2 of 4 tokens were accepted",
        "token-recycling bench --rounds 2",
        "c0ffee",
    ):
        assert said in text
    assert "One<mark> two three</mark> four" in html


def test_needs_nothing_but_itself(whole):
    html, _ = whole
    for outside in ("http", "src=", "@import", "<script", "<link", "<img", "<iframe"):
        assert outside not in html


def test_the_same_summary_gives_the_same_bytes(whole):
    assert report.render(example()) == whole[0]


def test_texts_are_escaped():
    summary = example()
    bad = "<script>alert('&')</script>"
    summary["losing"][0]["prompt"] = summary["sample"]["prompt"] = bad
    summary["sample"]["pieces"][1][0] = bad
    summary["machine"]["command"] = summary["questions"][0]["name"] = bad
    summary["model"]["name"] = bad
    summary["kinds"] = [*KINDS, bad, "$x$ \x07"]
    summary["decoders"][bad] = decoder(1.2)
    for one in summary["decoders"].values():
        one["kinds"] = dict.fromkeys(summary["kinds"], one["overall"])
    html, text = read(summary)
    assert "<script" not in html
    assert text.count(bad) >= 8


def test_a_run_without_drafts():
    """No decoder drafted, none lost, and nothing can be shown of an answer."""
    summary = example(["math"])
    summary["decoders"] = {"generate": decoder(1.0, None, ["math"])}
    summary |= {"losing": [], "sample": None}
    html, text = read(summary)
    assert re.findall("<h2>(.*?)</h2>", html) == SECTIONS
    for said in (
        "None: no drafting decoder was slower",
        "No sample was recorded",
        "No decoder accepted a drafted token",
        "No decoder was timed by phase",
        "No recycled decoder was compared with generate.",
        "No decoder was compared with generate.",
    ):
        assert said in text


@pytest.mark.parametrize(
    "speedup, verdict",
    [(1.5, "95 % interval 1.35 to 1.65). It"), (1.0, "no clear difference."), (0.5, ": slower.")],
)
def test_the_headline_is_honest(speedup, verdict):
    text = tables.headline(example(auto=speedup))
    assert text.startswith(f"tiny: The default (auto) decodes {speedup:.2f} times as fast as gen")
    assert f"median of 40 questions; quartiles {0.8 * speedup:.2f} and {1.2 * speedup:.2f}" in text
    assert verdict in text
    assert "So few" not in text


def test_the_headline_is_of_the_default_where_it_was_measured():
    assert "The default (auto) decodes 1.50" in tables.headline(example(auto=1.5, paper=1.9))
    assert "The fastest of 2 recycled decoders (paper)" in tables.headline(
        example(ranked=1.5, paper=1.9)
    )


def test_one_question_has_no_spread():
    found = example(auto=1.5)
    found["decoders"]["auto"]["overall"]["questions"] = 1
    assert "as fast as generate (one question). It is" in tables.headline(found)
    (row,) = [row for row in tables.overall(found).rows if row[0] == "auto"]
    assert "1.35" not in " ".join(row)


def test_the_headline_says_how_little_it_is():
    found = example(auto=1.5)
    found["decoders"]["auto"]["overall"]["questions"] = 11
    assert "So few questions say little about others." in tables.headline(found)
    found["repeating"] = [question["name"] for question in found["questions"]]
    assert "All answers only repeat themselves" in tables.headline(found)


def test_one_decoder_one_kind():
    html, _ = read(example(["math"], auto=1.5))
    assert '<th scope="row"><span>math</span></th>' in html


def test_write(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "render", lambda summary: f"<p>{summary['date']} – ✓</p>")
    report.write({"date": "today"}, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == "<p>today – ✓</p>"
    with pytest.raises(TokenRecyclingError, match="cannot write"):
        report.write({"date": "today"}, tmp_path / "none" / "report.html")

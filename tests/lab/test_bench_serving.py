"""The serving benchmark without an engine: summaries, tables, and wrong input."""

import sys

import pytest
import typer
from typer.testing import CliRunner

import bench_serving
import script
from bench_serving import check, measure, summary, table
from engines import Load, Pass, Vllm
from token_recycling import TokenRecyclingError

LOAD = Load(
    model="folder",
    mode="plain",
    arguments={"max_model_len": 64},
    warm_up=[[9]],
    prompts=[[1, 2], [3]],
    new_tokens=4,
    temperature=0.0,
    concurrency=[1, 2],
    chain=6,
    tree=15,
    options={"context": 512},
)


def test_every_pass_has_prompts_of_its_own():
    assert [LOAD.of(0), LOAD.of(1)] == [[[1, 2]], [[3]]]


@pytest.mark.parametrize(
    ("mode", "speculative"),
    [
        *[("plain", None), ("ngram", "ngram"), ("ngram_gpu", "ngram_gpu")],
        *[("chain", "token_recycling"), ("tree", "token_recycling")],
    ],
)
def test_arguments_of_vllm(mode, speculative):
    from dataclasses import replace

    found = Vllm.arguments(replace(LOAD, mode=mode))
    assert found["max_num_seqs"] == 2
    assert found["max_model_len"] == 64
    assert found.get("speculative_config", {}).get("method") == speculative
    if speculative == "token_recycling":
        config = found["speculative_config"]
        assert (config["mode"], config["context"]) == (mode, 512)


def life(rate, texts, concurrency=(1, 2)):
    return [Pass(n, seconds=4 / rate, texts=texts, drafts=4, accepted=6) for n in concurrency]


def test_modes_take_turns_and_are_summarised(monkeypatch):
    """Two rounds of two modes, in rotating order; one text of the second mode differs once."""
    texts = [[1, 2], [3, 4]]
    lives = {
        "plain": [life(10, texts), life(20, texts)],
        "ngram": [life(30, texts), life(50, [[1, 2], [3, 5]])],
    }
    monkeypatch.setattr(bench_serving, "find_spec", lambda name: True)
    monkeypatch.setattr(bench_serving, "_live", lambda engine, load: lives[load.mode].pop(0))
    order = []
    found = measure(
        "vllm", LOAD, ["plain", "ngram"], 2, lambda turn, mode: order.append((turn, mode))
    )
    assert order == [(0, "plain"), (0, "ngram"), (1, "ngram"), (1, "plain")]
    rows = summary(found)
    assert [(row["mode"], row["concurrency"]) for row in rows] == [
        ("plain", 1),
        ("plain", 2),
        ("ngram", 1),
        ("ngram", 2),
    ]
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([15, 15, 40, 40])
    assert rows[2]["quartiles"] == pytest.approx([35, 45])
    assert [row["same_as_first_mode"] for row in rows] == [4, 4, 3, 3]
    assert rows[0]["requests"] == 4
    assert rows[0]["tokens_per_draft"] == 2.5
    lines = table(rows).splitlines()
    assert len(lines) == 6
    assert "2.67" in lines[4]  # 40 over 15
    assert "3 of 4" in lines[4]


def test_a_failed_engine_is_one_line(monkeypatch):
    monkeypatch.setattr(bench_serving, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(TokenRecyclingError, match=r"vllm failed in mode plain: .*vllm") as caught:
        measure("vllm", LOAD, ["plain"], 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "modes", "says"),
    [
        ("llama.cpp", ["plain"], "no such engine"),
        ("vllm", ["plain", "eagle"], "no mode 'eagle'"),
        ("sglang", ["chain"], "no mode 'chain'"),
        ("vllm", [], "at least one"),
    ],
)
def test_wrong_engines_and_modes(engine, modes, says):
    with pytest.raises(TokenRecyclingError, match=says):
        check(engine, modes)


def refused(*given):
    """Run the script; return what it refuses."""
    app = typer.Typer()
    app.command()(bench_serving.main)
    refusal = CliRunner().invoke(app, given).exception
    assert isinstance(refusal, TokenRecyclingError)
    return str(refusal)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--engine", "vllm"], "not installed"),
        (["--engine", "nothing"], "no such engine"),
        (["--engine", "vllm", "--modes", "x"], "no mode"),
    ],
)
def test_wrong_engines(given, says):
    assert says in refused(*given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--concurrency", "1,x"], "whole numbers"),
        (["--concurrency", "0"], "whole numbers"),
        (["--engine-args", "[1]"], "not a JSON object"),
        (["--options", "{"], "not a JSON object"),
        (["--rounds", "0"], "1 or more"),
        (["--questions", "100000"], "there are"),
    ],
)
def test_wrong_options(monkeypatch, given, says):
    monkeypatch.setattr(bench_serving, "find_spec", lambda name: True)
    assert says in refused("--engine", "vllm", *given)


def test_wrong_input_of_a_script_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script"])

    def main():
        raise TokenRecyclingError("no such thing")

    with pytest.raises(SystemExit) as ended:
        script.run(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no such thing\n"

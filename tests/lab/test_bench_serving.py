"""The serving benchmark without an engine: times, summaries, tables, and wrong input."""

import json
import sys

import pytest
import typer
from typer.testing import CliRunner

import bench_serving
import script
from engine_bench import drive_vllm
from engine_bench import measure as measuring
from engine_bench.drive_vllm import Gaps, arguments
from engine_bench.load import Arrivals, Load, Pass
from engine_bench.measure import check, measure, summary, table, to_dict
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


def test_a_load_is_read_as_it_was_written(tmp_path):
    LOAD.save(tmp_path / "load.json")
    assert Load.read(tmp_path / "load.json") == LOAD


def test_times_of_a_request():
    """Two tokens after 3 s, the next three within 6 s more."""
    found = Pass(1)
    times = Arrivals(10.0)
    times.add(2, 13.0)
    times.add(4, 17.0)
    times.add(5, 19.0)
    times.end(found)
    assert found.first == [3.0]
    assert found.per_token == [2.0]
    only_one = Arrivals(0.0)
    only_one.add(1, 2.0)
    only_one.end(found)
    assert found.first == [3.0, 2.0]
    assert found.per_token == [2.0]


def test_gaps_are_between_logits_and_forwards(monkeypatch):
    import torch

    class Model(torch.nn.Identity):
        def compute_logits(self, hidden):
            return hidden

    now = iter([0.0, 10.0, 12.5, 20.0, 30.0])
    monkeypatch.setattr(drive_vllm, "perf_counter", lambda: next(now))
    model = Model()
    gaps = Gaps(model)
    for _ in range(3):
        model.compute_logits(model(torch.ones(1)))
    # The first logits are there at 0; the second forward begins at 10, with logits at 12.5.
    assert gaps.take() == [10.0, 7.5]
    assert gaps.take() == []


@pytest.mark.parametrize(
    ("mode", "speculative"),
    [
        *[("plain", None), ("ngram", "ngram"), ("ngram_gpu", "ngram_gpu")],
        *[("chain", "token_recycling"), ("tree", "token_recycling")],
    ],
)
def test_arguments_of_vllm(mode, speculative):
    from dataclasses import replace

    found = arguments(replace(LOAD, mode=mode))
    assert found["max_num_seqs"] == 2
    assert found["max_model_len"] == 64
    assert found.get("speculative_config", {}).get("method") == speculative
    if speculative == "token_recycling":
        config = found["speculative_config"]
        assert (config["mode"], config["context"]) == (mode, 512)


def life(rate, texts, concurrency=(1, 2)):
    return [
        Pass(
            n,
            seconds=4 / rate,
            texts=texts,
            first=[0.5, 0.7],
            per_token=[0.01 * n],
            gaps=[0.001, 0.003, 0.002],
            drafts=4,
            accepted=6,
        )
        for n in concurrency
    ]


def test_modes_take_turns_and_are_summarised(monkeypatch):
    """Two rounds of two modes, in rotating order; one text of the second mode differs once."""
    texts = [[1, 2], [3, 4]]
    lives = {
        "plain": [life(10, texts), life(20, texts)],
        "ngram": [life(30, texts), life(50, [[1, 2], [3, 5]])],
    }
    monkeypatch.setattr(measuring, "find_spec", lambda name: True)
    monkeypatch.setattr(measuring, "_live", lambda engine, load, limit: lives[load.mode].pop(0))
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
    assert rows[0]["between_forwards"] == 0.002
    assert rows[0]["tokens_per_draft"] == 2.5
    assert rows[1]["tpot"] == 0.02
    lines = table(rows).splitlines()
    assert len(lines) == 5
    assert "2.67" in lines[3]  # 40 over 15
    assert "3 of 4" in lines[3]
    json.dumps(to_dict(found))


def test_a_failed_engine_is_one_line(monkeypatch):
    monkeypatch.setattr(measuring, "find_spec", lambda name: True)
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
    monkeypatch.setattr(measuring, "find_spec", lambda name: True)
    assert says in refused("--engine", "vllm", *given)


def test_wrong_input_of_a_script_is_one_line(capsys):
    def main():
        raise TokenRecyclingError("no such thing")

    with pytest.raises(SystemExit) as ended:
        script.run(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no such thing\n"

"""Cost curves: reading between the points, keeping them, and measuring them."""

import json

import pytest
import torch

from architectures import make
from token_recycling import TokenRecycling, TokenRecyclingError
from token_recycling.cli import main
from token_recycling.decoding import tune as tuning
from token_recycling.decoding.tune import cached_path, find, identity
from token_recycling.drafting.size.costs import SIZES, CostCurve

CURVE = CostCurve((1, 2, 4), (100, 300), ((1.0, 2.0, 3.0), (3.0, 4.0, 5.0)), about={"model": "m"})


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("tokens", "context", "cost"),
    [
        (1, 100, 1.0),
        (3, 100, 2.5),
        (2, 200, 3.0),
        (6, 100, 5.0),  # beyond the sizes it goes on with the steepest rise
        (1, 10, 1.0),  # before the contexts it does not
        (1, 500, 5.0),
        (1, 10**6, 6.0),  # beyond twice the last context it ends
    ],
)
def test_between_and_beyond_the_points(tokens, context, cost):
    assert CURVE.at(tokens, context) == pytest.approx(cost)


@pytest.mark.parametrize("error", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("wrong", [24, 32, 48])
def test_one_wrong_point_does_not_make_batches_cheap(wrong, error):
    """A batch verifies many times the tokens that were measured."""
    sizes = (1, 2, 4, 8, 12, 16, 24, 32, 48)
    seconds = [(3.7 + 0.055 * n) * (error if n == wrong else 1) for n in sizes]
    curve = CostCurve(sizes, (64,), (tuple(seconds),))
    rise = (curve.at(256, 64) - curve.at(128, 64)) / 128
    assert rise > 0.9 * 0.055


def test_the_first_points_do_not_count_beyond_the_last():
    """On CPUs the second token often costs more than any later one."""
    sizes = (1, 2, 4, 8, 16, 32, 48)
    seconds = tuple(1.0 if n == 1 else 2 + 0.01 * n for n in sizes)
    assert CostCurve(sizes, (64,), (seconds,)).at(128, 64) == pytest.approx(2 + 0.01 * 128)


def test_assumed_curves_are_cheap_on_gpus_and_expensive_on_cpus():
    cuda, cpu = CostCurve.assumed("cuda"), CostCurve.assumed("cpu")
    assert not cuda.measured
    assert cuda.at(81, 0) < 1.3 * cuda.at(1, 0)
    assert cpu.at(81, 0) > 3 * cpu.at(1, 0)


def test_a_curve_travels(tmp_path):
    CURVE.save(tmp_path / "new" / "c.json")
    assert CostCurve.load(tmp_path / "new" / "c.json") == CURVE


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("sizes"),
        lambda d: d.update(format="other"),
        lambda d: d.update(sizes=[2, 3, 4]),
        lambda d: d.update(sizes=[1, 4, 2]),
        lambda d: d.update(seconds=[[1.0, 2.0, 3.0]]),
        lambda d: d.update(seconds=[[1.0, 2.0], [1.0, 2.0]]),
        lambda d: d.update(seconds=[[1.0, 0.0, 3.0], [1.0, 2.0, 3.0]]),
        lambda d: d.update(seconds=[[1.0, float("nan"), 3.0], [1.0, 2.0, 3.0]]),
        lambda d: d.update(seconds="x", contexts=[]),
        lambda d: d.clear(),
    ],
)
def test_a_damaged_curve_is_refused_and_found_curves_fall_back(change, tmp_path, bundled):
    path = cached_path(identity(bundled.model, bundled.target.device))
    CURVE.save(path)
    assert find(bundled.model, bundled.target.device) == CURVE
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(TokenRecyclingError, match="not a cost curve"):
        CostCurve.load(path)
    assert not find(bundled.model, bundled.target.device).measured


def test_a_curve_belongs_to_shape_type_device_and_threads(bundled, monkeypatch):
    device = bundled.target.device
    here = cached_path(identity(bundled.model, device))
    assert here == cached_path(identity(bundled.model, device))
    other = make("llama")
    assert here != cached_path(identity(other, device))
    assert cached_path(identity(other, device)) != cached_path(
        identity(make("llama").to(torch.bfloat16), device)
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert here != cached_path(identity(bundled.model, device))


def test_measuring_finds_that_more_tokens_cost_more_and_leaves_nothing(bundled):
    bundled.reset()
    expected = bundled.generate("Once", max_new_tokens=10).text
    before = bundled.matrix.candidates.clone()
    calls = []
    curve = tuning.measure(
        bundled,
        contexts=[64, 300],
        rounds=3,
        on_progress=lambda *progress: calls.append(progress),
    )
    assert curve.sizes == SIZES
    assert curve.contexts == (64, 300)
    for row in curve.seconds:
        assert row[-1] > 1.2 * row[0]
    assert torch.equal(bundled.matrix.candidates, before)
    assert calls[-1] == (8, 8)
    assert bundled.generate("Once", max_new_tokens=10, keep_context=True).text == expected != ""
    assert find(bundled.model, bundled.target.device).measured is False
    tuning.save_curve(bundled, curve)
    assert find(bundled.model, bundled.target.device) == curve
    assert TokenRecycling(bundled.model, bundled.tokenizer).draft_size.costs == curve


def test_an_unfinished_stream_cannot_continue_after_measuring(bundled):
    stream = bundled.stream("Once upon a time", max_new_tokens=20)
    next(stream)
    tuning.measure(bundled, contexts=[64], rounds=1)
    with pytest.raises(TokenRecyclingError, match="cannot continue"):
        list(stream)


@pytest.mark.parametrize("options", [{"contexts": [0]}, {"contexts": [5000]}, {"sizes": [2, 4]}])
def test_what_cannot_be_measured_is_refused(bundled, options):
    with pytest.raises(TokenRecyclingError, match="between 1 and"):
        tuning.measure(bundled, **options)


def test_a_model_decoded_plainly_has_nothing_to_tune():
    with pytest.warns(UserWarning, match="plain decoding"):
        recycler = TokenRecycling(make("mamba"))
    with pytest.raises(TokenRecyclingError, match="nothing to tune"):
        tuning.measure(recycler)


def test_tune_on_the_command_line(tmp_path, capsys):
    options = ["tune", "--contexts", "64", "--rounds", "1"]
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert "81" in shown.out
    assert "drafts start with" in shown.out
    assert list((tmp_path / "cache" / "costs").iterdir())
    with pytest.raises(SystemExit):
        main([*options, "--json"])
    assert json.loads(capsys.readouterr().out)["contexts"] == [64]


@pytest.mark.parametrize("options", [["--contexts", "5,x"], ["--contexts", "0"], ["--rounds", "0"]])
def test_bad_options_are_refused_before_loading(options, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["tune", *options])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1

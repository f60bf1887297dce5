"""Cost curves: reading between the points, keeping them, and measuring them."""

import json
import warnings
from time import perf_counter, sleep

import numpy as np
import pytest
import torch

from architectures import make
from token_recycling import TokenRecycling, TokenRecyclingError
from token_recycling.decoding import cost_measurement
from token_recycling.decoding.cost_measurement import (
    SECONDS,
    SIZES,
    cached_path,
    identity,
    measure,
    measured_curve,
)
from token_recycling.drafting.size.costs import CostCurve

CURVE = CostCurve((1, 2, 4), (1.0, 2.0, 3.0), about={"model": "m"})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def target(bundled):
    return bundled.target


def test_between_and_beyond_the_points():
    """Beyond the sizes the curve goes on with the steepest rise."""
    assert CURVE.at(np.array([1, 3, 4, 6])).tolist() == [1.0, 2.5, 3.0, 5.0]
    assert CURVE.at(6) == 5.0


@pytest.mark.parametrize("error", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("wrong", [24, 32, 48])
def test_one_wrong_point_does_not_make_batches_cheap(wrong, error):
    """A batch verifies many times the tokens that were measured."""
    sizes = (1, 2, 4, 8, 12, 16, 24, 32, 48)
    seconds = [(3.7 + 0.055 * n) * (error if n == wrong else 1) for n in sizes]
    curve = CostCurve(sizes, tuple(seconds))
    rise = (curve.at(256) - curve.at(128)) / 128
    assert rise > 0.9 * 0.055


def test_the_first_points_do_not_count_beyond_the_last():
    """On CPUs the second token often costs more than any later one."""
    sizes = (1, 2, 4, 8, 16, 32, 48)
    seconds = tuple(1.0 if n == 1 else 2 + 0.01 * n for n in sizes)
    assert CostCurve(sizes, seconds).at(128) == pytest.approx(2 + 0.01 * 128)


def test_assumed_curves_are_cheap_on_gpus_and_expensive_on_cpus():
    cuda, cpu = CostCurve.assumed("cuda"), CostCurve.assumed("cpu")
    assert not cuda.measured
    assert cuda.at(81) < 1.3 * cuda.at(1)
    assert cpu.at(81) > 3 * cpu.at(1)


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
        lambda d: d.update(sizes=[1, 2, float("inf")]),
        lambda d: d.update(sizes=[1, 2, 10**400]),
        lambda d: d.update(seconds=[1.0, 2.0]),
        lambda d: d.update(seconds=[1.0, 0.0, 3.0]),
        lambda d: d.update(seconds=[5e-324, 1.0, 3.0]),
        lambda d: d.update(sizes=[*range(1, 1502)], seconds=[1.0] * 1501),
        lambda d: d.update(seconds=[1.0, float("nan"), 3.0]),
        lambda d: d.update(seconds="x", sizes=[]),
        lambda d: d.clear(),
    ],
)
def test_a_damaged_curve_is_measured_again(change, target):
    path = cached_path(identity(target.model, target.device))
    CURVE.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured_curve(target) == CURVE
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(TokenRecyclingError, match="not a cost curve"):
        CostCurve.load(path)
    with pytest.warns(UserWarning, match="not a cost curve.*; it is measured again") as caught:
        found = measured_curve(target)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
    assert len(str(caught[0].message)) < 400
    assert found.measured
    assert found != CURVE
    assert CostCurve.load(path) == found


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", "\ufffd", ""])
def test_files_that_are_no_curve(text, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(TokenRecyclingError, match="not a cost curve") as caught:
        CostCurve.load(tmp_path / "c.json")
    assert "\n" not in str(caught.value)


def test_a_curve_belongs_to_shape_type_device_and_threads(target, monkeypatch):
    device = target.device
    here = cached_path(identity(target.model, device))
    assert here == cached_path(identity(target.model, device))
    other = make("llama")
    assert here != cached_path(identity(other, device))
    assert cached_path(identity(other, device)) != cached_path(
        identity(make("llama").to(torch.bfloat16), device)
    )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert here != cached_path(identity(target.model, device))


def test_more_tokens_cost_more_and_nothing_is_left(bundled, cache):
    bundled.reset()
    expected = bundled.generate("Once", max_new_tokens=10).text
    before = bundled.matrix.candidates.clone()
    curve = measured_curve(bundled.target)
    assert set(curve.sizes) <= set(SIZES)
    assert curve.measured
    assert curve.at(48) > 1.2 * curve.at(1)
    assert torch.equal(bundled.matrix.candidates, before)
    assert bundled.generate("Once", max_new_tokens=10).text == expected != ""
    assert len(list((cache / "costs").iterdir())) == 1
    assert measured_curve(bundled.target) == curve  # of the file: a new one would differ
    assert TokenRecycling(bundled.model, bundled.tokenizer).draft_size.costs == curve


class Slow:
    """A target whose steps take ``seconds`` longer."""

    def __init__(self, target, seconds):
        self.target, self.seconds = target, seconds

    def __getattr__(self, name):
        return getattr(self.target, name)

    def verify(self, draft):
        sleep(self.seconds)
        return self.target.verify(draft)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.15])
def test_the_clock_ends_the_measurement(target, seconds):
    """Sizes for which there was no time are left out, 1 and the largest that fits are not."""
    begin = perf_counter()
    found = measure(Slow(target, seconds))
    assert perf_counter() - begin < SECONDS + 1
    assert found[1] >= seconds
    assert list(found) == list(SIZES[: len(found)])
    assert len(found) >= 2


def test_models_with_slow_steps_are_not_measured(target, cache):
    begin = perf_counter()
    assert measure(Slow(target, cost_measurement.LONGEST_STEP + 0.1)) is None
    assert perf_counter() - begin < 1
    assert not measured_curve(Slow(target, 0.3)).measured
    assert not cache.exists()


def test_a_context_without_room_is_not_measured():
    recycler = TokenRecycling(make("llama", max_position_embeddings=40), nodes=4)
    assert measure(recycler.target) is None
    assert not measured_curve(recycler.target).measured


def test_a_folder_that_cannot_be_written_is_no_error(target, cache):
    cache.write_text("a file")
    assert measured_curve(target).measured

"""The skinny GEMM gives the same products, and only where it was measured to be faster."""

import copy
import json
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from architectures import make
from models import plain, random_prompts
from token_recycling import TokenRecycling
from token_recycling.model import skinny_gemm, skinny_trial
from token_recycling.model.skinny_gemm import SkinnyGemm
from token_recycling.model.skinny_trial import BUDGET, CLEAR, MOST_ROWS, ROWS, winning_rows

ALL = range(2, MOST_ROWS + 1)


class Model(torch.nn.Module):
    def __init__(self, *shape, **options):
        super().__init__()
        self.layer = torch.nn.Linear(*shape, **options)

    def forward(self, inputs):
        return self.layer(inputs)


@pytest.fixture
def calls(monkeypatch):
    """Products that went the other way round."""
    seen = []
    turned = skinny_gemm.turned
    monkeypatch.setattr(skinny_gemm, "turned", lambda *a: seen.append(a) or turned(*a))
    return seen


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The file of a new machine."""
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "cache"))
    new_process(monkeypatch)
    return tmp_path / "cache" / "skinny-gemm-1.json"


def new_process(monkeypatch):
    monkeypatch.setattr(skinny_trial, "_settled", {})


class Machine:
    """Takes ``seconds(way, shape, rows)`` for a product; ``asked`` lists them."""

    def __init__(self, monkeypatch, seconds):
        self.seconds, self.now, self.asked = seconds, 0.0, []
        monkeypatch.setattr(skinny_trial, "perf_counter", lambda: self.now)
        for way in ("linear", "turned"):
            monkeypatch.setattr(skinny_trial, way, self._timed(way))

    def _timed(self, way):
        def run(inputs, weight, bias):
            assert inputs.dtype == weight.dtype == torch.float32
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_grad_enabled()
            self.asked.append((way, tuple(weight.shape), len(inputs)))
            self.now += self.seconds(*self.asked[-1])

        return run


@pytest.fixture
def always(monkeypatch):
    """A machine on which W x^T always takes half the time."""
    return Machine(monkeypatch, lambda way, shape, rows: 1e-4 if way == "turned" else 2e-4)


def turned_at(model, width):
    """Return the numbers of rows, up to 70, at which the forward of ``model`` uses ``turned``."""
    found, turned = [], skinny_gemm.turned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(skinny_gemm, "turned", lambda x, *a: found.append(len(x)) or turned(x, *a))
        for rows in range(1, 70):
            model(torch.ones(rows, width))
    return found


def ratio_of_three_rows():
    with torch.inference_mode():
        return skinny_trial.measured_ratio([torch.ones(4, 4)], 3, 9.0)


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 7, 16, 17, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (), (2, 3)])
def test_the_products_are_the_same(rows, bias, shape, calls, always):
    model = Model(24, 40, bias=bias)
    inputs = torch.randn(*shape, rows, 24)
    expected = model(inputs)
    with torch.inference_mode(), SkinnyGemm(model):
        found = model(inputs)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found + 1e-3, expected, atol=1e-5)
    assert len(calls) == (rows * (6 if shape == (2, 3) else 1) in ALL)


def test_other_types_and_row_counts_go_the_ordinary_way(calls, always):
    SkinnyGemm(Model(8, 5))  # the shape itself gains
    for dtype, rows in ((torch.bfloat16, 3), (torch.float64, 3), (torch.float32, MOST_ROWS + 1)):
        model = Model(8, 5, dtype=dtype)
        with SkinnyGemm(model):
            model(torch.ones(rows, 8, dtype=dtype))
    assert not calls
    model = Model(8, 5)
    with SkinnyGemm(model):
        model(torch.ones(3, 8))
        assert len(calls) == 1
        with torch.autocast("cpu"):
            assert model(torch.ones(3, 8)).dtype == torch.bfloat16
    assert len(calls) == 1


@pytest.mark.parametrize("shape", [(0, 5), (8, 0)])
def test_empty_weights(shape, calls, always):
    model = Model(*shape)
    with SkinnyGemm(model):
        assert model(torch.ones(3, shape[0])).shape == (3, shape[1])
    assert not calls


def test_weights_with_a_linear_of_their_own_keep_it(calls, always):
    """As torchao's quantised weights have."""
    asked = []

    class Quantised(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(getattr(function, "__name__", ""))
            return torch.zeros(3, 5) if function is functional.linear else NotImplemented

    model = Model(8, 5, bias=False)
    products = SkinnyGemm(model)
    del model.layer.weight
    object.__setattr__(model.layer, "weight", torch.ones(5, 8).as_subclass(Quantised))
    with products:
        model(torch.ones(3, 8))
    assert "linear" in asked
    assert not calls


def test_other_threads_and_other_callers_get_the_ordinary_way(calls, always):
    model = Model(8, 5)
    products = SkinnyGemm(model)
    ready, go = threading.Barrier(2), threading.Event()

    def other():
        with SkinnyGemm(model):
            ready.wait()
            go.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    model(torch.ones(3, 8))
    assert not calls
    go.set()
    thread.join()
    with products, products:
        model(torch.ones(3, 8))
    assert len(calls) == 1
    with pytest.raises(ZeroDivisionError), products:
        raise ZeroDivisionError
    model(torch.ones(3, 8))
    assert len(calls) == 1


def test_nothing_of_torch_is_replaced(monkeypatch):
    """A patch that another library puts into ``functional.linear`` meanwhile stays, and is used."""
    model = Model(8, 5)
    with SkinnyGemm(model):
        monkeypatch.setattr(functional, "linear", lambda *a: "another library's")
        patched = functional.linear
    assert functional.linear is patched
    assert model(torch.ones(3, 8)) == "another library's"


def test_layers_that_somebody_else_has_changed_stay_so(calls, always):
    """As accelerate does to move inputs."""
    model = Model(8, 5)
    model.layer.forward = lambda inputs: "moved"
    with SkinnyGemm(model):
        assert model(torch.ones(3, 8)) == "moved"


def test_a_copy_of_the_model_has_ordinary_layers(calls, always):
    model = Model(8, 5)
    products = SkinnyGemm(model)
    twin = copy.deepcopy(model)
    with products:
        assert torch.equal(twin(torch.ones(3, 8)), functional.linear(
            torch.ones(3, 8), twin.layer.weight, twin.layer.bias))  # fmt: skip
        assert not calls
        with SkinnyGemm(twin):
            twin(torch.ones(3, 8))
    assert len(calls) == 1


# shape of the weight and rows -> ratio of the times
MEASURED = {
    (40, 24): dict.fromkeys(ROWS, 0.5) | {2: 2.0, 15: 1.2, 16: 1.2},
    (24, 40): dict.fromkeys(ROWS, 1.9) | {8: 0.8, 12: 0.92, 48: 0.7},
}


def by_table(way, shape, rows):
    return 1e-4 * (MEASURED[shape][rows] if way == "turned" else 1)


def test_the_faster_way_is_used_per_shape_and_number_of_rows(monkeypatch):
    """The negative control: one choice for all shapes or rows fails."""
    Machine(monkeypatch, by_table)
    wide, high = Model(24, 40), Model(40, 24)
    with SkinnyGemm(torch.nn.ModuleList([wide, high])):
        assert turned_at(wide, 24) == [*range(4, 13), *range(24, 49)]
        assert turned_at(high, 40) == [8, 9, 10, 11, 12, 48]


def test_a_gain_must_be_clear_and_between_two_measured_numbers_both_must_gain():
    assert winning_rows({}) == frozenset()
    assert winning_rows(dict.fromkeys(ROWS, CLEAR - 0.01)) == frozenset(ALL)
    assert winning_rows(dict.fromkeys(ROWS, CLEAR)) == frozenset()
    assert winning_rows({8: 0.5, 12: 0.5, 16: 0.5}) == {8, 9, 10, 11, 12, 16}


@pytest.mark.parametrize("disturbed", [(0, 1, 2, 3), (0, 1, 2, 3, 4, 5)])
def test_disturbed_times_of_linear_do_not_choose_turned(disturbed, monkeypatch):
    """The shortest times alone would in neither case, the medians in both."""
    rounds = []

    def seconds(way, shape, rows):
        if way == "turned":
            return 1e-4
        rounds.append(rows)
        return 7e-3 if (len(rounds) - 1) % 7 in disturbed else 1e-4

    Machine(monkeypatch, seconds)
    assert ratio_of_three_rows() == pytest.approx(1.0)
    assert len(rounds) == 7


def test_one_lucky_time_of_turned_does_not_choose_it(monkeypatch):
    """The shortest time alone would."""
    rounds = []

    def seconds(way, shape, rows):
        rounds.append(way)
        return 1e-5 if len(rounds) == 8 else 1e-4

    Machine(monkeypatch, seconds)
    assert ratio_of_three_rows() == pytest.approx(1.0)


def test_the_ways_take_turns_and_read_every_layers_weight(monkeypatch):
    seen = []
    for way in ("linear", "turned"):
        monkeypatch.setattr(
            skinny_trial, way, lambda i, w, b, way=way: seen.append((way, w.data_ptr()))
        )
    model = torch.nn.ModuleList(Model(8, 5) for _ in range(3))
    SkinnyGemm(model)
    assert [way for way, _ in seen[:4]] == ["linear", "turned"] * 2
    places = [one.layer.weight.data_ptr() for one in model]
    assert [place for _, place in seen[:6]] == places * 2


def test_large_weights_are_measured_in_pieces(monkeypatch, always):
    monkeypatch.setattr(skinny_trial, "PIECE", 64)
    SkinnyGemm(Model(16, 10))
    assert {shape for _, shape, _ in always.asked} == {(4, 16)}
    model = Model(100, 3)
    with SkinnyGemm(model):
        assert turned_at(model, 100) == list(ALL)
    assert {shape for _, shape, _ in always.asked} == {(4, 16), (1, 100)}


def test_the_callers_random_numbers_and_autocast_do_not_matter(always):
    model = Model(8, 5)
    before = torch.get_rng_state()
    with torch.autocast("cpu"):
        SkinnyGemm(model)
    assert always.asked
    assert torch.equal(torch.get_rng_state(), before)
    assert model.layer.weight.grad is None


class TestFile:
    def test_later_processes_use_it(self, cache, monkeypatch):
        machine = Machine(monkeypatch, by_table)
        models = torch.nn.ModuleList([Model(24, 40), Model(40, 24)])
        first = SkinnyGemm(models).table
        assert {shape for _, shape, _ in machine.asked} == {(40, 24), (24, 40)}
        assert {rows for _, _, rows in machine.asked} == set(ROWS)
        ((_, kept),) = json.loads(cache.read_text()).items()
        assert kept["24x40"]["12"] == 0.92
        machine.asked.clear()
        new_process(monkeypatch)
        assert SkinnyGemm(models).table == first
        assert not machine.asked

    def test_what_it_says_is_followed(self, cache, monkeypatch, always):
        """The control of the test above: the file decides, not the times of this process."""
        SkinnyGemm(Model(8, 5))
        data = json.loads(cache.read_text())
        ((_, kept),) = data.items()
        kept["5x8"] = dict.fromkeys(map(str, ROWS), 1.5) | {"6": 0.5}
        cache.write_text(json.dumps(data))
        new_process(monkeypatch)
        model = Model(8, 5)
        with SkinnyGemm(model):
            assert turned_at(model, 8) == [6]

    @pytest.mark.parametrize("what", ["processor", "instructions", "threads", "torch"])
    def test_other_machines_are_measured_and_kept_beside(self, what, cache, monkeypatch, always):
        SkinnyGemm(Model(8, 5))
        count = len(always.asked)
        new_process(monkeypatch)
        place, name, value = {
            "processor": (skinny_trial, "processor", lambda: "another"),
            "instructions": (skinny_trial, "instructions", lambda: ["another"]),
            "threads": (torch, "get_num_threads", lambda: 77),
            "torch": (torch, "__version__", "99.0"),
        }[what]
        monkeypatch.setattr(place, name, value)
        SkinnyGemm(Model(8, 5))
        assert len(always.asked) == 2 * count
        assert len(json.loads(cache.read_text())) == 2

    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"{",
            b"null",
            b"[1]",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"m": 3}',
            b'{"m": {"5x8": [1]}}',
            b'{"m": {"5xx": {"2": 1.0}}}',
            b'{"m": {"5x8": {"2": null}}}',
            b'{"m": {"5x8": {"2": NaN}}}',
            b'{"m": {"5x8": {"2": -1.0}}}',
            b'{"m": {"5x8": {"2": 1' + b"0" * 400 + b"}}}",
        ],
    )
    def test_a_broken_one_is_measured_anew(self, text, cache, monkeypatch, always, recwarn):
        machine = skinny_trial._machine(torch.get_num_threads())
        cache.parent.mkdir()
        cache.write_bytes(text.replace(b'"m"', json.dumps(machine).encode()))
        model = Model(8, 5)
        with SkinnyGemm(model):
            assert turned_at(model, 8) == list(ALL)
        assert not recwarn
        assert len(always.asked) == 2 * len(ROWS) * skinny_trial.ROUNDS
        assert set(json.loads(cache.read_text())[machine]["5x8"]) == set(map(str, ROWS))

    @pytest.mark.parametrize("place", ["a file", "a folder", "no home"])
    def test_one_that_cannot_be_written(self, place, cache, monkeypatch, always, recwarn):
        if place == "a file":
            cache.parent.write_text("in the way of the folder")
        elif place == "a folder":
            cache.mkdir(parents=True)
        else:
            monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("none")))
            monkeypatch.delenv("TOKEN_RECYCLING_CACHE")
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        model = Model(8, 5)
        with SkinnyGemm(model):
            assert turned_at(model, 8) == list(ALL)
        assert not recwarn

    def test_what_another_process_wrote_meanwhile_stays(self, cache, monkeypatch, always):
        SkinnyGemm(Model(8, 5))
        (machine,) = json.loads(cache.read_text())
        other = {machine: {"7x7": {"2": 0.5}}, "another": {"5x8": {"2": 0.5}}}
        read = json.loads

        def meanwhile(text):
            monkeypatch.setattr(json, "loads", read)
            cache.write_text(json.dumps(other))
            return read(text)

        monkeypatch.setattr(json, "loads", meanwhile)
        SkinnyGemm(Model(8, 6))
        data = json.loads(cache.read_text())
        assert data["another"] == other["another"]
        assert set(data[machine]) == {"7x7", "6x8"}


class TestTime:
    def test_the_budget_is_kept_and_the_rest_is_left_to_the_next_process(self, monkeypatch):
        machine = Machine(monkeypatch, lambda way, shape, rows: 0.02 if way == "turned" else 0.03)
        small, large = Model(8, 5), Model(8, 9)
        models = torch.nn.ModuleList([large, small])
        table = SkinnyGemm(models).table
        assert machine.now < BUDGET[0] + 0.05
        assert {shape for _, shape, _ in machine.asked} == {(5, 8)}
        assert table[(5, 8)]
        assert not table[(9, 8)]
        passed = machine.now
        assert SkinnyGemm(models).table == table
        assert machine.now == passed
        for _ in range(9):
            new_process(monkeypatch)
            SkinnyGemm(models)
        assert SkinnyGemm(models).table == dict.fromkeys(table, frozenset(ALL))
        asked = 2 * 2 * len(ROWS) * skinny_trial.LEAST_ROUNDS
        assert asked <= len(machine.asked) < 1.2 * asked  # repeated: what was cut off

    def test_large_models_get_more_but_not_more_than_the_most(self, monkeypatch):
        for height, most in ((10**7 // 8, 1.3), (10**9 // 8, BUDGET[2])):
            new_process(monkeypatch)
            machine = Machine(monkeypatch, lambda *a: 0.5)
            weights = torch.empty(1).expand(height, 8)  # takes no memory
            skinny_trial.turned_rows({(height, 8): [weights]})
            assert most <= machine.now <= most + 0.5

    def test_long_products_are_measured_fewer_times(self, monkeypatch):
        machine = Machine(monkeypatch, lambda *a: 0.004)
        ratio_of_three_rows()
        assert len(machine.asked) == 2 * skinny_trial.LEAST_ROUNDS
        # Not if they are long because the machine is busy.
        busy = Machine(monkeypatch, lambda *a: 0.001 if len(busy.asked) == 4 else 0.004)
        ratio_of_three_rows()
        assert len(busy.asked) == 2 * skinny_trial.ROUNDS


def test_a_process_keeps_its_choice(monkeypatch):
    model = Model(24, 40)
    Machine(monkeypatch, by_table)
    products = SkinnyGemm(model)
    first = products.table
    Machine(monkeypatch, lambda *a: 1.0)
    products.prepare()
    assert products.table == first
    with products:
        assert turned_at(model, 24) == sorted(first[(40, 24)])
    new_process(monkeypatch)
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", "/dev/null/none")
    products.prepare()
    assert products.table == {(40, 24): frozenset()}


def test_another_number_of_threads_has_its_own_choice_from_the_next_prompt_on(monkeypatch):
    Machine(monkeypatch, by_table)
    model = Model(24, 40)
    products = SkinnyGemm(model)
    before = sorted(products.table[(40, 24)])
    with products:
        Machine(monkeypatch, lambda *a: 1e-4)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        products.prepare()
        assert turned_at(model, 24) == before != []
    with products:
        assert turned_at(model, 24) == []


@pytest.mark.parametrize("faster", [True, False])
def test_an_answer_uses_the_faster_way(faster, calls, monkeypatch):
    ratio = 0.5 if faster else 2.0
    Machine(monkeypatch, lambda way, shape, rows: 1e-4 * (ratio if way == "turned" else 1))
    model, (prompt,) = make("llama"), random_prompts([12])
    answer = TokenRecycling(model, tree="ranked-16").generate(prompt, max_new_tokens=20)
    assert answer.token_ids == plain(model, prompt, 20)
    assert bool(calls) == faster


def test_real_times(cache):
    table = SkinnyGemm(torch.nn.ModuleList([Model(64, 64), Model(64, 128)])).table
    assert set(table) == {(64, 64), (128, 64)}
    (kept,) = json.loads(cache.read_text()).values()
    assert kept
    assert all(0 < ratio < 1e4 for ratios in kept.values() for ratio in ratios.values())

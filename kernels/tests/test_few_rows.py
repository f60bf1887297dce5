"""The linear layers for few rows on a CPU: right numbers, and in our own forwards only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from few import first_of
from skinny_kernels import layers, linear, team
from skinny_kernels.activations import GELU, GELU_TANH, SILU
from skinny_kernels.layers import cover
from skinny_kernels.linear import FEW_TOKENS, Layer, product, products
from skinny_kernels.module_forms import ACTIVATIONS
from skinny_kernels.shadow import shadow_of
from skinny_kernels.vectors import BYTES, Processor, processor

pytestmark = pytest.mark.skipif(
    not team.is_available(), reason="there is no team of threads on this machine"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12}


def right(found, x, w, bias=None):
    """True if ``found`` is x W^T + bias, up to the rounding of its dtype and of the sums."""
    exact = functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    size = functional.linear(
        x.double().abs(), w.double().abs(), None if bias is None else bias.double().abs()
    )
    sums = size * (x.shape[-1] + 2) * 2**-24
    off = (found.double() - exact).abs()
    return bool((off <= sums + 2 * ROUNDING[w.dtype] * exact.abs() + 1e-7).all())


# Among them sizes that tiles of AMX multiply, where there are some.
OUTPUTS = st.integers(1, 77) | st.integers(1, 6).map(lambda n: 16 * n)
INPUTS = st.integers(1, 300) | st.integers(1, 9).map(lambda n: 32 * n)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, FEW_TOKENS),
    outputs=OUTPUTS,
    inputs=INPUTS,
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
    wider=st.integers(0, 3),
    turned=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_products(rows, outputs, inputs, dtype, bias, wider, turned, seed):
    draws = torch.Generator().manual_seed(seed)
    w = torch.randn(outputs, inputs + wider, generator=draws).to(dtype)[:, :inputs]
    x = torch.randn(rows, inputs, generator=draws).to(dtype)
    if turned:
        x = x.T.contiguous().T
    b = (
        torch.randn(outputs, 1 + wider, generator=draws).to(dtype)[:, 0].contiguous()
        if bias
        else None
    )
    assert right(product(x, w, b), x, w, b)


@pytest.mark.parametrize("shape", [(101, 587), (80, 576)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_among_any_others_and_in_any_number_of_threads(dtype, shape):
    """So a plain step and a verified one compute the same numbers in these layers."""
    outputs, inputs = shape
    x, w, b = torch.randn(FEW_TOKENS, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    x, w, b = x.to(dtype), w.to(dtype), b.to(dtype)
    threads = torch.get_num_threads()
    try:
        whole = product(x, w, b)
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            for rows in range(1, FEW_TOKENS + 1):
                assert torch.equal(product(x[:rows], w, b), whole[:rows])
                assert torch.equal(product(x[-rows:], w, b), whole[-rows:])
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(whole[:1], whole[1:2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 71])
def test_values_that_are_not_finite_stay_in_their_row(value, dtype, inputs):
    x, w = torch.randn(9, inputs).to(dtype), torch.randn(48, inputs).to(dtype)
    x[4, -1] = value
    found = product(x, w)
    assert not found[4].isfinite().any()
    found[4] = x[4] = 0
    assert right(found, x, w)
    w[17] = value
    found = product(x, w)
    assert not found[x.abs().sum(1) > 0][:, 17].isfinite().any()
    assert found[:4, :17].isfinite().all()


def test_rounding_to_half_precision():
    """To nearest, ties to even, as PyTorch rounds; the largest numbers become infinite."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.tensor([[1.0, 1.0]], dtype=dtype)
        unit = torch.finfo(dtype).eps
        pairs = [[1.0, n * unit / 4] for n in range(9)] + [[torch.finfo(dtype).max] * 2]
        w = torch.tensor(pairs, dtype=torch.float64).to(dtype)
        wanted = (w.double().sum(1)).to(dtype)
        assert torch.equal(product(x, w)[0], wanted)


def test_shapes_of_inputs():
    w, b = torch.randn(40, 24), torch.randn(40)
    for shape in ((24,), (1, 24), (2, 3, 24), (1, 7, 24)):
        x = torch.randn(shape)
        found = product(x, w, b)
        assert found.shape == (*shape[:-1], 40)
        assert torch.allclose(found, functional.linear(x, w, b), atol=1e-5)


# Runs the products above with a kernel compiled for another processor, or a broken one.
CHECK = """
import sys, torch
from skinny_kernels import amx_tile, elementwise_kernel, linear_kernel, tile
from skinny_kernels.vectors import processor
numba = linear_kernel.numba
numba.cfunc = lambda kind, cache=True, cfunc=numba.cfunc: cfunc(kind)
{fault}
sys.path.insert(0, {tests!r})
from test_few_rows import DTYPES, product, right
wrong = 0
for dtype in DTYPES:
    for rows in (1, 2, 3, 4, 5, 8, 9, 30, 64):
        for inputs, outputs in ((1, 53), (15, 53), (32, 48), (64, 80), (77, 53), (131, 53)):
            x, w, b = (torch.randn(n, inputs).to(dtype) for n in (rows, outputs, outputs))
            b = b[:, 0].contiguous()
            wrong += not right(product(x, w, b), x, w, b)
print(processor(), wrong)
"""


def in_another_process(fault="", **env):
    tests = os.path.dirname(__file__)
    script = CHECK.format(fault=fault, tests=tests)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | env
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


NARROWER = {
    "AVX2": ("haswell", "+avx2,+fma,+f16c,+bmi,+bmi2", 8),
    "AVX-512": ("skylake-avx512", "+avx2,+fma,+f16c,+avx512f,+avx512vl,+avx512bw,+avx512dq", 16),
}


@pytest.mark.slow  # kernels are compiled anew
@pytest.mark.parametrize("name", NARROWER)
def test_narrower_vectors(name):
    cpu, features, lanes = NARROWER[name]
    if {"AVX2": "avx2", "AVX-512": "avx512f"}[name] not in Path(
        "/proc/cpuinfo"
    ).read_text().split():
        pytest.skip("this processor does not run them")
    found = in_another_process(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)
    assert found.startswith(f"Processor(lanes={lanes}, dot_bfloat16=False, tiles=False")
    assert found.endswith(" 0")


FAULTS = {
    "tail": "tile.DenseTile._rest = lambda self, whole, inputs, sums: sums",
    "fold": "tile._first_halves = lambda lanes, width, f=tile._first_halves: "
    "(f(lanes, width)[0], f(lanes, width)[1][::-1])",
    "bias": "bias = tile.Tile._write\n"
    "tile.Tile._write = lambda self, sums, y, stride, b: bias(self, sums, y, stride, tile.I64(0))",
}


def test_processors():
    assert Processor.of("+avx2,+fma,+avx512f,+avx512bf16") == Processor(16, True)
    assert Processor.of("+avx2,+fma,+avx512f,-avx512bf16") == Processor(16, False)
    assert Processor.of("+avx2,+fma,-avx512f") == Processor(8, False)
    vnni = Processor.of("+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vnni")
    assert (vnni.dot_unsigned, vnni.dot_bytes) == ("vpdpbusd", True)
    vnni = Processor.of("+avx2,+fma,+f16c,+avxvnni")
    assert (vnni.dot_unsigned, vnni.dot_bytes) == ("{vex} vpdpbusd", True)
    assert Processor.of("+avx2,+fma,+f16c") == Processor(8, False, dot_bytes=True)
    assert Processor.of("+neon,+fp-armv8") == Processor(4, False)
    assert Processor.of("+neon,+dotprod").dot_bytes
    assert Processor.of("+sse4.2,-avx2") == Processor(0, False)


AMX_FAULTS = {
    "bias": "amx_tile.AmxTile.bias = lambda self, *about: self.splat(0.0)",
    "interleaving": "elementwise_kernel.Emitter.transposed = lambda self, rows: rows",
    "second tile": "amx = amx_tile.AmxEmitter.amx\n"
    "amx_tile.AmxEmitter.amx = lambda self, name, *a: amx(self, name, *(5 if n == 4 else n "
    "for n in a) if name == 'tdpbf16ps' else a)",
}


@pytest.mark.skipif(not processor().tiles, reason="this processor has no AMX")
@pytest.mark.parametrize("fault", first_of(AMX_FAULTS))
def test_faults_of_amx_show(fault):
    assert not in_another_process(AMX_FAULTS[fault]).endswith(" 0")


def test_code_for_amx():
    """Compiled by LLVM, run where there is AMX: four products for two tiles of W and two of x."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from skinny_kernels.amx_tile import AmxTile

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    tile = AmxTile(module, 2, 2).tile()
    tile.linkage = "external"
    checked = llvm.parse_assembly(str(module))
    checked.verify()
    target = llvm.Target.from_triple(module.triple)
    code = target.create_target_machine(cpu="sapphirerapids", opt=3).emit_assembly(checked)
    assert code.count("tdpbf16ps") == 4
    assert code.count("prefetcht1") == 32


@pytest.mark.parametrize("fault", first_of(FAULTS))
def test_faults_show(fault):
    assert not in_another_process(FAULTS[fault]).endswith(" 0")


def test_code_for_arm():
    """Compiled by LLVM and not run: a tile of 4 x 4 sums has 16 multiply-adds of 4 numbers."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from skinny_kernels.tile import DenseTile

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    for dtype in range(len(BYTES)):
        module = ir.Module()
        module.triple = "aarch64-unknown-linux-gnu"
        tile = DenseTile(module, Processor(4, False), dtype, 4, 4, 2).tile()
        tile.linkage = "external"
        checked = llvm.parse_assembly(str(module))
        checked.verify()
        machine = llvm.Target.from_triple(module.triple).create_target_machine(
            cpu="neoverse-n1", opt=3
        )
        code = machine.emit_assembly(checked)
        assert code.count("fmla") == 16
        assert code.count("prfm\tpldl2keep") == 2
        assert machine.emit_object(checked)


# A layer for tiles of AMX beside one that is not.
@example(rows=2, heights=[1, 48], inputs=128, dtype=torch.bfloat16, seed=4)
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 40),
    heights=st.lists(OUTPUTS, min_size=1, max_size=3),
    inputs=INPUTS,
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_layers_with_the_same_inputs(rows, heights, inputs, dtype, seed):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=draws).to(dtype)
    layers = [
        Layer(
            torch.randn(height, inputs, generator=draws).to(dtype),
            torch.randn(height, generator=draws).to(dtype) if height % 2 else None,
        )
        for height in heights
    ]
    found = products(x, layers)
    for (weight, bias, *_), one in zip(layers, found):
        assert torch.equal(one, product(x, weight, bias))
        assert right(one, x, weight, bias)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 40),
    height=OUTPUTS,
    inputs=INPUTS,
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from([SILU, GELU_TANH, GELU]),
    seed=st.integers(0, 2**16),
)
def test_gated_layers(rows, height, inputs, dtype, activation, seed):
    """Rounded where PyTorch rounds: to the gate, to its activation and to the product."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=draws).to(dtype)
    gate, up = (torch.randn(height, inputs, generator=draws).to(dtype) for _ in range(2))
    found, _ = products(x, [Layer(gate), Layer(up)], gated=activation)
    other = product(x, up)
    activated = ACTIVATIONS[activation](product(x, gate).double()).to(dtype)
    wanted = activated * other
    off = (found.float() - wanted.float()).abs()
    smallest = 2**-24 * other.float().abs()  # an activation may be the smallest number above 0
    assert (off <= 8 * ROUNDING[dtype] * wanted.float().abs() + smallest + 1e-6).all()
    for row in range(rows):
        alone, _ = products(x[row : row + 1], [Layer(gate), Layer(up)], gated=activation)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, GELU])
def test_gates_that_are_not_finite(activation):
    gate = torch.tensor([[1e30, -1e30, float("nan"), 0.0, -200.0, 200.0]]).T.contiguous()
    x, up = torch.ones(1, 1), torch.full((6, 1), 2.0)
    found, _ = products(x, [Layer(gate), Layer(up)], gated=activation)
    wanted = ACTIVATIONS[activation](gate.T) * 2
    assert torch.allclose(found, wanted, equal_nan=True)


class Model(torch.nn.Module):
    def __init__(self, *shape, **options):
        super().__init__()
        self.layer = torch.nn.Linear(*shape, **options)

    def forward(self, inputs):
        return self.layer(inputs)


def stock_attention(stock, *arguments, **options):
    return stock(*arguments, **options)


def fast(model):
    """The shadow of a model, computed by the kernels."""
    shadow = shadow_of(model)
    cover(shadow, stock_attention)
    return shadow


@pytest.fixture
def calls(monkeypatch):
    """Products of the kernel."""
    seen = []
    kernel = linear.products
    monkeypatch.setattr(linear, "products", lambda *a, **k: seen.append(a) or kernel(*a, **k))
    return seen


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 17, FEW_TOKENS, FEW_TOKENS + 1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers(rows, bias, dtype, calls):
    model = Model(24, 40, bias=bias, dtype=dtype)
    x = torch.randn(rows, 24).to(dtype)
    found = fast(model)(x)
    assert right(found, x, model.layer.weight, model.layer.bias)
    assert len(calls) == (rows <= FEW_TOKENS)


def test_other_types_go_the_ordinary_way(calls):
    model = Model(8, 5, dtype=torch.float64)
    with torch.inference_mode():
        fast(model)(torch.ones(3, 8, dtype=torch.float64))
    model = fast(Model(8, 5))
    with torch.inference_mode():
        with torch.autocast("cpu"):
            assert model(torch.ones(3, 8)).dtype == torch.bfloat16
        assert not calls
        model(torch.ones(3, 8))
    assert len(calls) == 1


@pytest.mark.parametrize("shape", [(3, 7), (3, 9), ()])
def test_inputs_of_another_size_raise_as_before(shape, calls):
    with torch.inference_mode(), pytest.raises(RuntimeError):
        fast(Model(8, 5))(torch.ones(shape))
    assert not calls


def test_a_bias_of_another_type_raises_as_before(calls):
    model = Model(8, 5)
    model.layer.bias.data = model.layer.bias.data.bfloat16()
    with torch.inference_mode(), pytest.raises(RuntimeError):
        fast(model)(torch.ones(3, 8))
    assert not calls


def test_gradients_go_the_ordinary_way(calls):
    model = Model(8, 5)
    inputs = torch.ones(3, 8, requires_grad=True)
    fast(model)(inputs).sum().backward()
    assert not calls
    assert inputs.grad is not None


@pytest.mark.parametrize("shape", [(0, 5), (8, 0)])
def test_empty_weights(shape, calls):
    model = Model(*shape)
    with torch.inference_mode():
        assert fast(model)(torch.ones(3, shape[0])).shape == (3, shape[1])
    assert not calls


def test_weights_with_a_linear_of_their_own_keep_it(calls):
    """As torchao's quantised weights have."""
    asked = []

    class Quantised(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(getattr(function, "__name__", ""))
            return torch.zeros(3, 5) if function is functional.linear else NotImplemented

    model = Model(8, 5, bias=False)
    shadow = fast(model)
    del shadow.layer.weight
    object.__setattr__(shadow.layer, "weight", torch.ones(5, 8).as_subclass(Quantised))
    with torch.inference_mode():
        shadow(torch.ones(3, 8))
    assert "linear" in asked
    assert not calls


@torch.no_grad()
def test_weights_that_are_written_to(calls):
    """Nothing is copied, so a write through ``.data`` is seen; a turned weight by a new shadow."""
    model = Model(8, 5, bias=False)
    shadow = fast(model)
    first = shadow(torch.ones(3, 8))
    model.layer.weight.data.mul_(2)
    assert torch.equal(shadow(torch.ones(3, 8)), 2 * first)
    assert len(calls) == 2
    model.layer.weight.data = model.layer.weight.data.T.contiguous().T
    assert torch.equal(shadow(torch.ones(3, 8)), 2 * first)  # what it was made of lives on
    assert len(calls) == 3
    assert torch.allclose(fast(model)(torch.ones(3, 8)), 2 * first)
    assert len(calls) == 3


@torch.inference_mode()
def test_the_model_itself_stays_as_it_is(calls):
    model = Model(8, 5)
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    shadow = fast(model)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before
    model(torch.ones(3, 8))
    assert not calls
    shadow(torch.ones(3, 8))
    assert len(calls) == 1


def test_layers_that_somebody_else_has_changed_stay_so(calls):
    """As accelerate does to move inputs."""
    model = Model(8, 5)
    model.layer.forward = lambda inputs: "moved"
    assert fast(model)(torch.ones(3, 8)) == "moved"


def test_no_team_means_the_ordinary_way(monkeypatch, calls):
    monkeypatch.setattr(layers.attention, "is_available", lambda: False)
    with torch.inference_mode():
        fast(Model(8, 5))(torch.ones(3, 8))
    assert not calls

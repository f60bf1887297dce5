"""Weights in the block formats of GGUF files: numbers, products and layers."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from few import first_of
from token_recycling.model.cpu import linear, packed, team
from token_recycling.model.cpu.block_formats import FORMATS
from token_recycling.model.cpu.block_tile import GROUP
from token_recycling.model.cpu.linear import MOST_TOKENS, Layer, product, products
from token_recycling.model.cpu.packed import PackedEmbedding, PackedLinear, dequantised

pytestmark = pytest.mark.skipif(
    not team.is_available(), reason="there is no team of threads on this machine"
)
# Bytes of a block where its float16 scales and minima are.
HALVES = {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,)}
HALVES |= {10: (80, 82), 11: (108,), 12: (0, 2), 13: (0, 2), 14: (208,)}
HALVES |= {20: (0,), 23: (0,), 39: ()}
MXFP4 = 39
TYPES = sorted(FORMATS)
NAMES = [FORMATS[ggml_type].name for ggml_type in TYPES]


def blocks(ggml_type, rows, inputs, seed=0, wider=0):
    """Return random blocks, uint8 [rows, bytes], whose scales are of both signs."""
    form, draws = FORMATS[ggml_type], np.random.default_rng(seed)
    count = rows * (inputs + wider) // form.numbers
    raw = draws.integers(0, 256, (count, form.size), dtype=np.uint8)
    for at in HALVES[ggml_type]:
        scales = draws.uniform(-0.03, 0.03, count).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    if ggml_type == MXFP4:
        raw[:, 0] = draws.integers(117, 124, count)  # exponents
    found = torch.from_numpy(raw.reshape(rows, -1))
    return found[:, : inputs // form.numbers * form.size]


def numbers(ggml_type, w):
    """Return the numbers of blocks as the package gguf computes them, in float64."""
    kind = gguf.GGMLQuantizationType(ggml_type)
    return torch.from_numpy(gguf.quants.dequantize(w.contiguous().numpy(), kind)).double()


def rounded(x):
    """Return inputs as they are rounded, in float64, and by how much one may be off."""
    groups = x.unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).double() / 127
    whole = (groups.double() / scale.clamp_min(1e-40)).round()
    return (whole * scale).flatten(-2), scale.expand_as(groups).flatten(-2)


def right(found, x, ggml_type, w, bias=None):
    """True if ``found`` is x W^T + bias for rounded x, up to the rounding of float32.

    A number that lies between two whole ones may be rounded to either.
    """
    exact, step = rounded(x)
    near = ((x.double() / step.clamp_min(1e-40)) % 1 - 0.5).abs() < 1e-5
    matrix = numbers(ggml_type, w)
    wanted = functional.linear(exact, matrix)
    size = functional.linear(exact.abs(), matrix.abs())
    # A scale and a minimum, or an offset, may cancel each other.
    largest = matrix.abs().amax(1) + 256 * 0.03
    size = size + functional.linear(exact.abs(), largest[:, None].expand_as(matrix) * 0.1)
    allowed = size * (x.shape[-1] + 8) * 2**-24 + functional.linear(
        (near * step).double(), matrix.abs()
    )
    if bias is not None:
        wanted, allowed = wanted + bias.double(), allowed + bias.double().abs() * 2**-23
    return bool(((found.double() - wanted).abs() <= allowed + 1e-9).all())


@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
def test_dequantised_numbers_are_those_of_the_package_gguf(ggml_type):
    w = blocks(ggml_type, 37, 768, wider=256)
    found = dequantised(w, ggml_type, 768)
    wanted = numbers(ggml_type, w).float()
    # A product and a minimum are added in one rounding here.
    largest = wanted.abs().max() if FORMATS[ggml_type].minima else 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(largest) * 2**-22)


def test_powers_of_two_without_an_exponent_of_their_own():
    w = blocks(MXFP4, 3, 256)
    w.view(3, 8, 17)[:, :, 0] = torch.arange(24).view(3, 8) % 3
    assert torch.equal(dequantised(w, MXFP4, 256).double(), numbers(MXFP4, w))


@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, MOST_TOKENS),
    outputs=st.integers(1, 50),
    count=st.integers(1, 5),
    bias=st.booleans(),
    wider=st.integers(0, 1),
    seed=st.integers(0, 2**16),
)
def test_products(ggml_type, rows, outputs, count, bias, wider, seed):
    size = FORMATS[ggml_type].numbers
    inputs = count * size
    draws = torch.Generator().manual_seed(seed)
    w = blocks(ggml_type, outputs, inputs, seed, wider * size)
    x = torch.randn(rows, inputs, generator=draws) * 10 ** torch.randn(inputs, generator=draws)
    b = torch.randn(outputs, generator=draws) if bias else None
    assert right(product(x, w, b, ggml_type), x, ggml_type, w, b)


@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
def test_a_row_has_the_same_bits_among_any_others_and_in_any_number_of_threads(ggml_type):
    w, x = blocks(ggml_type, 101, 768), torch.randn(MOST_TOKENS, 768)
    before = torch.get_num_threads()
    try:
        whole = product(x, w, None, ggml_type)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (*range(1, 20), 33, 64, 127):
                assert torch.equal(product(x[:rows], w, None, ggml_type), whole[:rows])
                assert torch.equal(product(x[-rows:], w, None, ggml_type), whole[-rows:])
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(whole[:1], whole[1:2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
def test_values_that_are_not_finite_stay_in_their_row(ggml_type, value):
    w, x = blocks(ggml_type, 20, 512), torch.randn(9, 512)
    x[4, 300] = value
    found = product(x, w, None, ggml_type)
    assert not found[4].isfinite().any()
    found[4] = x[4] = 0
    assert right(found, x, ggml_type, w)


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-20, 1e20])
@pytest.mark.parametrize("ggml_type", [3, 8, 12, 14])
def test_very_small_and_large_inputs(ggml_type, size):
    w, x = blocks(ggml_type, 20, 512), torch.randn(3, 512) * size
    found = product(x, w, None, ggml_type)
    assert found.isfinite().all()
    assert right(found / max(size, 1.0), x / max(size, 1.0), ggml_type, w)


def test_layers_of_several_kinds_with_the_same_inputs():
    x = torch.randn(5, 256)
    layers = [Layer(blocks(t, n, 256), None, t) for t, n in ((12, 48), (14, 16), (12, 16))]
    for layer, found in zip(layers, products(x, layers)):
        assert torch.equal(found, product(x, *layer))
        assert layer.inputs == 256


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_gated_layers(rows):
    x = torch.randn(rows, 256)
    gate, up = (Layer(blocks(12, 70, 256, seed), None, 12) for seed in (1, 2))
    found, _ = products(x, [gate, up], gated=True)
    wanted = functional.silu(product(x, *gate)) * product(x, *up)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, MOST_TOKENS, MOST_TOKENS + 1])
def test_a_layer(rows, dtype, monkeypatch):
    """Many rows are multiplied by strips of dequantised weights."""
    monkeypatch.setattr(packed, "STRIP", 256 * 20)
    w, bias = blocks(12, 70, 256), torch.randn(70)
    layer = PackedLinear(256, w, 12, bias)
    x = torch.randn(1, rows, 256).to(dtype)
    found = layer(x)
    assert found.shape == (1, rows, 70)
    assert found.dtype == dtype
    wanted = functional.linear(x.double(), numbers(12, w), bias.double())
    off = (found.double() - wanted).norm() / wanted.norm()
    assert off < (0.02 if rows <= MOST_TOKENS else 1e-5 if dtype == torch.float32 else 0.005)
    assert layer(x[:, :0]).shape == (1, 0, 70)
    assert repr(layer) == "PackedLinear(256, 70, bias=True, Q4_K)"


def test_an_embedding():
    w = blocks(14, 30, 512)
    table = PackedEmbedding(512, w, 14)
    ids = torch.tensor([[3, 0], [29, 3]])
    assert torch.equal(table(ids).double(), numbers(14, w)[ids])
    assert repr(table) == "PackedEmbedding(30, 512, Q6_K)"


# Runs the products above with a kernel compiled for another processor, or a broken one.
CHECK = """
import sys, torch
from token_recycling.model.cpu import block_formats, block_tile, elementwise_kernel, linear_kernel
from token_recycling.model.cpu.vectors import processor
numba = linear_kernel.numba
numba.cfunc = lambda kind, cache=True, cfunc=numba.cfunc: cfunc(kind)
{fault}
sys.path.insert(0, {tests!r})
from model.test_cpu_blocks import FORMATS, blocks, product, right
torch.manual_seed(0)
wrong = ""
for ggml_type in {types}:
    form = FORMATS[ggml_type]
    for rows in (1, 2, 3, 5, 8, 9, 30):
        for inputs in (32, 64, 96, 256, 768):
            if inputs % form.numbers == 0:
                x, w, b = torch.randn(rows, inputs), blocks(ggml_type, 23, inputs), torch.randn(23)
                if not right(product(x, w, b, ggml_type), x, ggml_type, w, b):
                    wrong = f"{{form.name}} is wrong"
print(processor(), wrong or "right")
"""


def in_another_process(fault="", types=TYPES, **env):
    tests = os.path.dirname(os.path.dirname(__file__))
    script = CHECK.format(fault=fault, tests=tests, types=types)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | env
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


SMALL = "+avx2,+fma,+f16c,+bmi,+bmi2"
NARROWER = {
    "AVX2": ("haswell", SMALL),
    "AVX-VNNI": ("alderlake", SMALL + ",+avxvnni"),
    "AVX-512 without VNNI": (
        "skylake-avx512",
        SMALL + ",+avx512f,+avx512vl,+avx512bw,+avx512dq",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROWER)
def test_narrower_vectors(name):
    needed = {"AVX2": "avx2", "AVX-VNNI": "avx_vnni", "AVX-512 without VNNI": "avx512bw"}[name]
    if needed not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor does not run them")
    cpu, features = NARROWER[name]
    found = in_another_process(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)
    assert found.endswith("right"), found
    assert "tiles=False" in found


# What is broken, and in which types it shows.
FAULTS = {
    "order of halves": (
        [12],
        "q = block_formats._q4_k\n"
        "block_formats.FORMATS[12] = __import__('dataclasses').replace("
        "block_formats.FORMATS[12], parts=lambda first: q(first ^ 32))",
    ),
    "minima": ([3], "block_tile.BlockTile._add_minima = lambda self, minima, at, totals: None"),
    "minima of 256": (
        [12],
        "block_tile.BlockTile._add_minima = lambda self, minima, at, totals: None",
    ),
    "offset": ([2], "block_tile.offset_of = lambda ggml_type, cpu: 0"),
    "scales": (
        [14],
        "block_formats.BlockRow.scale = lambda self, numbers: "
        "self._picked(self.scales, [numbers[0]] * len(numbers))",
    ),
    "last block": (
        [8],
        "block_tile.BlockTile._last_block = lambda self, whole, inputs, totals: totals",
    ),
    "table": (
        [23],
        "block_formats.FORMATS[23] = __import__('dataclasses').replace("
        "block_formats.FORMATS[23], table=block_formats.FLOAT4)",
    ),
    "fifth bits": (
        [6],
        "block_formats.BlockRow._fifth_bits = lambda self, first, count: block_formats.ir.Constant("
        "block_formats.ir.VectorType(block_formats.I8, count), [0] * count)",
    ),
}


@pytest.mark.parametrize("fault", first_of(FAULTS))
def test_faults_show(fault):
    types, code = FAULTS[fault]
    assert in_another_process(code, types).endswith("wrong")


def test_without_the_instruction_of_avx_512():
    """One type here; all of them, and other processors, in ``test_narrower_vectors``."""
    found = in_another_process(types=[8], NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=SMALL)
    assert found.endswith("right"), found


def test_code_for_arm():
    """Compiled by LLVM and not run: 4 rows of weights times 2 of inputs, 64 numbers at a time."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from token_recycling.model.cpu.block_tile import BlockTile, Rounding, sums_of
    from token_recycling.model.cpu.vectors import Processor

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    cpu = Processor.of("+neon,+dotprod")
    assert cpu.lanes == 4
    assert cpu.dot_bytes
    for ggml_type in FORMATS:
        module = ir.Module()
        module.triple = "aarch64-unknown-linux-gnu"
        for function in (
            BlockTile(module, cpu, ggml_type, 4, 2, 4).tile(),
            Rounding(module, cpu, sums_of(ggml_type, cpu)).row(),
        ):
            function.linkage = "external"
        checked = llvm.parse_assembly(str(module))
        checked.verify()
        machine = llvm.Target.from_triple(module.triple).create_target_machine(
            cpu="neoverse-n1", features="+dotprod", opt=3
        )
        code = machine.emit_assembly(checked)
        assert code.count("\tsdot\t") >= 16 * FORMATS[ggml_type].numbers // 32


def test_the_kernel_is_used_for_few_rows(monkeypatch):
    seen = []
    kernel = linear.products
    monkeypatch.setattr(linear, "products", lambda *a, **k: seen.append(a) or kernel(*a, **k))
    layer = PackedLinear(256, blocks(8, 16, 256), 8)
    layer(torch.randn(MOST_TOKENS, 256))
    assert len(seen) == 1
    layer(torch.randn(MOST_TOKENS + 1, 256))
    assert len(seen) == 1

"""Weights in the block formats of GGUF files: numbers, products and layers."""

import os
import platform
import re
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
from skinny_kernels import linear, team
from skinny_kernels.activations import SILU
from skinny_kernels.block_formats import FORMATS, ROWS
from skinny_kernels.block_inputs import GROUP
from skinny_kernels.block_tile import MOST_ROWS
from skinny_kernels.linear import FEW_TOKENS, Layer, products
from skinny_kernels.packed import (
    PackedEmbedding,
    PackedLinear,
    filled_up,
    interleaved,
    read_rows,
)

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
# Each is compiled for half a minute; the first four: with minima, without, in K blocks, in a table.
COMPILED = sorted(TYPES, key=lambda ggml_type: ggml_type not in (3, 8, 12, MXFP4))
COMPILED_NAMES = [FORMATS[ggml_type].name for ggml_type in COMPILED]


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


def layer_of(ggml_type, w, bias=None):
    """Return the layer with these blocks of a file."""
    return Layer(interleaved(w, ggml_type), bias, ggml_type, len(w))


def product(x, w, bias, ggml_type):
    """Multiply by blocks of a file."""
    return products(x, [layer_of(ggml_type, w, bias)])[0]


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
def test_rows_have_the_numbers_of_the_package_gguf(ggml_type):
    """In an order of their own, and as wide as a part of what is in memory."""
    w = blocks(ggml_type, 37, 768, wider=256)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1))
    weight = interleaved(w, ggml_type, order)
    assert weight.shape == (48, w.shape[1])
    found = read_rows(weight, ggml_type, torch.arange(37))
    wanted = numbers(ggml_type, w)[order].float()
    # A product and a minimum are added in one rounding here.
    largest = wanted.abs().max() if FORMATS[ggml_type].minima else 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(largest) * 2**-22)
    filled = read_rows(weight, ggml_type, torch.arange(37, 48))
    assert ggml_type == MXFP4 or not filled.any()


@pytest.mark.parametrize("ggml_type", TYPES, ids=NAMES)
def test_memory(ggml_type):
    """As many bytes as in the file, but for rows that fill up the last ones."""
    w = blocks(ggml_type, 64, 512)
    assert interleaved(w, ggml_type).nbytes == w.numel()
    assert sum(size for _, size in FORMATS[ggml_type].elements()) == FORMATS[ggml_type].size


def test_powers_of_two_without_an_exponent_of_their_own():
    w = blocks(MXFP4, 3, 256)
    w.view(3, 8, 17)[:, :, 0] = torch.arange(24).view(3, 8) % 3
    found = read_rows(interleaved(w, MXFP4), MXFP4, torch.arange(3))
    assert torch.equal(found.double(), numbers(MXFP4, w))


@pytest.mark.parametrize("ggml_type", first_of(COMPILED, 4), ids=COMPILED_NAMES)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, FEW_TOKENS),
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


@pytest.mark.parametrize("ggml_type", first_of(COMPILED, 4), ids=COMPILED_NAMES)
def test_a_row_has_the_same_bits_among_any_others_and_in_any_number_of_threads(ggml_type):
    w, x = blocks(ggml_type, 101, 768), torch.randn(FEW_TOKENS, 768)
    before = torch.get_num_threads()
    try:
        whole = product(x, w, None, ggml_type)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (*range(1, 20), 33, MOST_ROWS, MOST_ROWS + 1, 127):
                assert torch.equal(product(x[:rows], w, None, ggml_type), whole[:rows])
                assert torch.equal(product(x[-rows:], w, None, ggml_type), whole[-rows:])
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(whole[:1], whole[1:2])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("ggml_type", first_of(COMPILED, 4), ids=COMPILED_NAMES)
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
    layers = [layer_of(t, blocks(t, n, 256)) for t, n in ((12, 47), (14, 16), (12, 16))]
    for layer, found in zip(layers, products(x, layers)):
        assert torch.equal(found, products(x, [layer])[0])
        assert layer.inputs == 256
        assert found.shape == (5, layer.outputs)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_gated_layers(rows):
    x = torch.randn(rows, 256)
    gate, up = (layer_of(12, blocks(12, 70, 256, seed)) for seed in (1, 2))
    found, _ = products(x, [gate, up], gated=SILU)
    first, second = (products(x, [layer])[0] for layer in (gate, up))
    wanted = functional.silu(first) * second
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, FEW_TOKENS, 300])
def test_a_layer(rows, dtype):
    w, bias = blocks(12, 70, 256), torch.randn(70)
    layer = PackedLinear(256, 70, interleaved(w, 12), 12, bias)
    x = torch.randn(1, rows, 256).to(dtype)
    found = layer(x)
    assert found.shape == (1, rows, 70)
    assert found.dtype == dtype
    assert torch.equal(found[:, :1], layer(x[:, :1]))
    wanted = functional.linear(x.double(), numbers(12, w), bias.double())
    assert (found.double() - wanted).norm() / wanted.norm() < 0.02
    assert layer(x[:, :0]).shape == (1, 0, 70)
    assert repr(layer) == "PackedLinear(256, 70, bias=True, Q4_K)"


def test_an_embedding():
    w = blocks(14, 30, 512)
    table = PackedEmbedding(30, 512, interleaved(w, 14), 14)
    ids = torch.tensor([[3, 0], [29, 3]])
    assert torch.equal(table(ids).double(), numbers(14, w)[ids])
    assert table(ids[:0]).shape == (0, 2, 512)
    assert repr(table) == "PackedEmbedding(30, 512, Q6_K)"
    for wrong in (-1, 30, 31):
        with pytest.raises(IndexError):
            table(torch.tensor([0, wrong]))


# Runs the products above with a kernel compiled for another processor, or a broken one.
CHECK = """
import sys, torch
from llvmlite import ir
from skinny_kernels import block_amx, block_formats, block_inputs, block_layout
from skinny_kernels import block_products, block_tile, linear_kernel, vectors
from skinny_kernels.vectors import Processor, processor
numba = linear_kernel.numba
numba.cfunc = lambda kind, cache=True, cfunc=numba.cfunc: cfunc(kind)
sys.path.insert(0, {tests!r})
{fault}
from test_blocks import FORMATS, blocks, product, right
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
    tests = os.path.dirname(__file__)
    script = CHECK.format(fault=fault, tests=tests, types=types)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | env
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


SMALL = "+avx2,+fma,+f16c,+bmi,+bmi2"
NARROWER = {
    "AVX2": ("avx2", "haswell", SMALL),
    "AVX-VNNI": ("avx_vnni", "alderlake", SMALL + ",+avxvnni"),
    "AVX-512 without VNNI": (
        "avx512bw",
        "skylake-avx512",
        SMALL + ",+avx512f,+avx512vl,+avx512bw,+avx512dq",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROWER)
def test_narrower_vectors(name):
    needed, cpu, features = NARROWER[name]
    if needed not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor does not run them")
    found = in_another_process(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features)
    assert found.endswith("right"), found
    assert "tiles=False" in found


# Processors by the lanes of their vectors and their instruction for products of bytes.
EMULATED = {
    "AVX-512 VNNI": "16, False, False, 'vpdpbusd', True",
    "AVX-VNNI": "8, False, False, 'vpdpbusd', True",
    "AVX2": "8, False, False, '', True",
    "NEON": "4, False, False, '', True",
}
EMULATE = """
Processor.of = classmethod(lambda cls, features: cls({about}))
import emulated_dots
emulated_dots.install()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", EMULATED)
def test_wider_and_narrower_vectors_in_plain_instructions(name):
    """LLVM makes vectors of any width from those that there are; products of bytes are emulated."""
    found = in_another_process(EMULATE.format(about=EMULATED[name]))
    assert found.endswith("right"), found


def test_wider_vectors_in_plain_instructions():
    """One type that has minima; all of them, and other processors, above."""
    found = in_another_process(EMULATE.format(about=EMULATED["AVX-512 VNNI"]), types=[12])
    assert found.endswith("right"), found


# What is broken, and in which types it shows.
FAULTS = {
    "order of halves": (
        [12],
        "q = block_formats._q4_k\n"
        "block_formats.FORMATS[12] = __import__('dataclasses').replace("
        "block_formats.FORMATS[12], parts=lambda first: q(first ^ 32))",
    ),
    "minima": (
        [3],
        "old = block_formats._scale_and_minimum\n"
        "block_formats.FORMATS[3] = __import__('dataclasses').replace(block_formats.FORMATS[3],"
        "scale=lambda blocks, n: (old(blocks, n)[0], blocks.emitter.splat(0.0)))",
    ),
    "sums of halves": (
        [14],
        "block_inputs.HALF_SUMS = block_products.HALF_SUMS = block_products.SUM",
    ),
    "offset": (
        [2],
        "block_formats.FORMATS[2] = __import__('dataclasses').replace("
        "block_formats.FORMATS[2], offset=7)",
    ),
    "scales": (
        [14],
        "old = block_formats._q6_k_scale\n"
        "block_formats.FORMATS[14] = __import__('dataclasses').replace("
        "block_formats.FORMATS[14], scale=lambda blocks, n: old(blocks, n // 2 * 2))",
    ),
    "last blocks": ([8], "block_tile.CHUNK = block_tile.GROUPS * 64"),
    "rows": ([8], "block_tile.ROWS = 8"),
    "table": (
        [23],
        "block_formats.FORMATS[23] = __import__('dataclasses').replace("
        "block_formats.FORMATS[23], table=block_formats.FLOAT4)",
    ),
    "fifth bits": ([6], "block_layout._rearranged = lambda b, word: word"),
    "sums in 16 bits": (
        [8],
        EMULATE.format(about=EMULATED["AVX2"]) + "old = block_products.Dots.__init__\n"
        "def new(self, *arguments, **options):\n"
        "    old(self, *arguments, **options)\n"
        "    self.many = 8\n"
        "block_products.Dots.__init__ = new",
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
    """Compiled by LLVM and not run: two rows of inputs times 16 of weights, 32 numbers each."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from skinny_kernels.block_inputs import Record
    from skinny_kernels.block_products import Products
    from skinny_kernels.block_tile import Unpacking
    from skinny_kernels.vectors import Processor

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    cpu = Processor.of("+neon,+dotprod")
    assert cpu.lanes == 4
    assert cpu.dot_bytes
    for ggml_type in FORMATS:
        module = ir.Module()
        module.triple = "aarch64-unknown-linux-gnu"
        for function in (
            Products(module, cpu, ggml_type, 2).products(),
            Unpacking(module, cpu, ggml_type).unpack(),
            Record(module, cpu.lanes).record(),
        ):
            function.linkage = "external"
        checked = llvm.parse_assembly(str(module))
        checked.verify()
        machine = llvm.Target.from_triple(module.triple).create_target_machine(
            cpu="neoverse-n1", features="+dotprod", opt=3
        )
        code = machine.emit_assembly(checked)
        assert code.count("\tsdot\t") == 2 * ROWS // 4 * GROUP // 4


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM assembles instructions of its own")
@pytest.mark.parametrize("ggml_type", first_of(COMPILED, 4), ids=COMPILED_NAMES)
def test_code_for_avx_512(ggml_type):
    """Compiled and not run: an instruction multiplies 16 rows by a number of x in memory."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from skinny_kernels.block_products import Products
    from skinny_kernels.block_tile import AT_ONCE
    from skinny_kernels.vectors import Processor

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    features = "+avx512f,+avx512bw,+avx512vl,+avx512vnni"
    cpu, s = Processor.of(features), AT_ONCE[16][0]
    module = ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    Products(module, cpu, ggml_type, s).products().linkage = "external"
    machine = llvm.Target.from_triple(module.triple).create_target_machine(
        cpu="cascadelake", features=features, opt=3
    )
    code = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert len(re.findall(r"vpdpbusd\t\d*\(%\w+\)\{1to16\}, %zmm", code)) == s * GROUP // 4
    assert len(re.findall(r"\(%r[sb]p\)", code)) < 8  # sums stay in registers


@pytest.mark.parametrize("ggml_type", [8, 12])
def test_code_for_amx(ggml_type):
    """Compiled and not run: one instruction multiplies 32 numbers of 16 rows by 16 rows of x."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from skinny_kernels.amx_tile import SIDE
    from skinny_kernels.block_amx import AmxProducts
    from skinny_kernels.vectors import Processor

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    cpu = Processor(16, True, True, "vpdpbusd", True, True)
    AmxProducts(module, cpu, ggml_type, SIDE).products().linkage = "external"
    machine = llvm.Target.from_triple(module.triple).create_target_machine(
        cpu="sapphirerapids", opt=3
    )
    code = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert code.count("\ttdpbsud\t") == 1
    assert len(re.findall(r"zmm\d+, -?\d*\(%r[sb]p\)", code)) < 10  # sums stay in registers


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM assembles instructions of its own")
def test_code_for_avx_512_without_vnni():
    """Assembled and not run: instructions and registers of AVX2."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from skinny_kernels.block_tile import BlockTile
    from skinny_kernels.vectors import Processor

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    features = "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq"
    cpu = Processor.of(features).for_blocks()
    assert cpu.lanes == 8
    for ggml_type in FORMATS:
        module = ir.Module()
        module.triple = "x86_64-unknown-linux-gnu"
        BlockTile(module, cpu, ggml_type).tile().linkage = "external"
        machine = llvm.Target.from_triple(module.triple).create_target_machine(
            cpu="skylake-avx512", features=features, opt=3
        )
        checked = llvm.parse_assembly(str(module))
        checked.verify()
        assert machine.emit_object(checked)


def test_the_kernel_is_used_for_any_number_of_rows(monkeypatch):
    seen = []
    kernel = linear.products
    monkeypatch.setattr(linear, "products", lambda *a, **k: seen.append(a) or kernel(*a, **k))
    layer = PackedLinear(256, 16, interleaved(blocks(8, 16, 256), 8), 8)
    for rows in (1, FEW_TOKENS, FEW_TOKENS + 1):
        layer(torch.randn(rows, 256))
    assert len(seen) == 3


def test_rows_that_fill_up():
    assert [filled_up(n) for n in (1, 16, 17)] == [16, 16, 32]

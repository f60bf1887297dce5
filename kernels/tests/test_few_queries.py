"""Attention of few tokens on a CPU: right numbers, in any shape, layout and number of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from few import first_of
from skinny_kernels import attention, team
from skinny_kernels.attention import attend, pack_mask
from skinny_kernels.attention_kernel import KEYS
from skinny_kernels.vectors import DTYPES

pytestmark = pytest.mark.skipif(
    not team.is_available(), reason="there is no team of threads on this machine"
)
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12}


def case(batch, heads, group, tokens, slots, size, value_size, dtype, seed=0):
    """Queries, keys and values of a cache with free slots, and a mask that hides a third."""
    draws = torch.Generator().manual_seed(seed)

    def states(heads, slots, size):
        return torch.randn(batch, slots, heads, size, generator=draws).to(dtype)

    query = states(heads * group, tokens, size).transpose(1, 2)
    key, value = (
        states(slots + 7, heads, n).view(batch, heads, slots + 7, n)[:, :, :slots]
        for n in (size, value_size)
    )
    hidden = torch.rand(batch, 1, tokens, slots, generator=draws) < 0.3
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
    return query, key, value, mask, size**-0.5


def found(query, key, value, mask, scale, committed=None, cap=0.0):
    group = query.shape[1] // key.shape[1]
    if committed is None:
        committed = torch.full((len(mask),), mask.shape[3] - mask.shape[2])
    return attend(query, key, value, pack_mask(mask, committed, group), committed, scale, cap)


def exact(query, key, value, mask, scale, cap=0.0):
    """The same in float64, with keys and values repeated for the heads of a group."""
    query, key, value, mask = (x.double() for x in (query, key, value, mask))
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = query @ key.mT * scale
    scores = cap * (scores / cap).tanh() if cap else scores
    return ((scores + mask).softmax(-1) @ value).transpose(1, 2)


def right(*inputs, cap=0.0):
    wanted = exact(*inputs, cap)
    off = (found(*inputs, cap=cap).double() - wanted).abs()
    return bool((off <= 2e-5 + 2 * ROUNDING[inputs[0].dtype] * wanted.abs()).all())


@settings(max_examples=120, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.integers(1, 9),
    tokens=st.integers(1, 64),
    before=st.integers(0, 3 * KEYS),
    size=st.integers(1, 130),
    value_size=st.integers(1, 130),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 2**16),
    cap=st.sampled_from([0.0, 0.5, 30.0]),
)
def test_attention(batch, heads, group, tokens, before, size, value_size, dtype, seed, cap):
    slots = before + tokens
    inputs = case(batch, heads, group, tokens, slots, size, value_size, dtype, seed)
    assert right(*inputs, cap=cap)


def test_a_cap_is_not_ignored():
    """The control of the test above."""
    inputs = case(1, 2, 2, 4, 90, 16, 16, torch.float32)
    assert right(*inputs, cap=0.5)
    wanted, ignored = exact(*inputs, 0.5), found(*inputs)
    assert (wanted - ignored).abs().max() > 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_other_queries_change_no_bit(dtype):
    query, key, value, mask, scale = case(2, 3, 2, 20, 2 * KEYS + 50, 64, 64, dtype)
    whole = found(query, key, value, mask, scale)
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(found(query, key, value, mask, scale), whole)
    finally:
        torch.set_num_threads(before)
    for n in (1, 3, 17):
        some = found(query[:, :, :n], key, value, mask[:, :, :n], scale)
        assert torch.equal(some, whole[:, :n])
    one = found(query[1:], key[1:], value[1:], mask[1:], scale)
    assert torch.equal(one, whole[1:])


@settings(max_examples=60, deadline=None)
@given(
    committed=st.lists(st.integers(0, 3 * KEYS), min_size=1, max_size=4),
    heads=st.integers(1, 2),
    group=st.integers(1, 4),
    tokens=st.integers(1, KEYS),
    size=st.integers(1, 70),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 2**16),
)
def test_rows_of_other_lengths_change_no_bit(committed, heads, group, tokens, size, dtype, seed):
    """Each row is what it is alone, whatever is in the slots between its keys."""
    longest = max(committed)
    slots = longest + tokens
    query, key, value, mask, scale = case(
        len(committed), heads, group, tokens, slots, size, size, dtype, seed
    )
    for row, length in enumerate(committed):
        mask[row, ..., length:longest] = torch.finfo(dtype).min
        mask[row, ..., longest] = 0  # every query sees something
        for states in (key, value):
            states[row, :, length:longest] = float("nan")
    whole = found(query, key, value, mask, scale, torch.tensor(committed))
    for row, length in enumerate(committed):
        own = [*range(length), *range(longest, slots)]
        states = (x[row : row + 1, :, own] for x in (key, value))
        alone = found(query[row : row + 1], *states, mask[row : row + 1, ..., own], scale)
        assert torch.equal(whole[row : row + 1], alone)


def test_hidden_slots_change_no_bit():
    """Whatever a draft writes behind the slots that a query sees."""
    query, key, value, mask, scale = case(1, 2, 3, 4, KEYS + 20, 32, 32, torch.float32)
    mask[..., KEYS - 5 :] = torch.finfo(torch.float32).min
    whole = found(query, key, value, mask, scale)
    key[..., KEYS - 5 :, :], value[..., KEYS - 5 :, :] = 100.0, -100.0
    assert torch.equal(found(query, key, value, mask, scale), whole)
    fewer = KEYS - 5
    assert torch.equal(
        found(query, key[:, :, :fewer], value[:, :, :fewer], mask[..., :fewer], scale), whole
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_in_their_query(bad):
    query, key, value, mask, scale = case(1, 2, 2, 5, KEYS + 9, 16, 16, torch.float32)
    whole = found(query, key, value, mask, scale)
    query[0, :, 3] = bad
    spoilt = found(query, key, value, mask, scale)
    assert not spoilt[0, 3].isfinite().any()
    others = [0, 1, 2, 4]
    assert torch.equal(spoilt[0, others], whole[0, others])


def test_great_scores():
    """The greatest score of a row counts, in whichever block it is."""
    query, key, value, mask, scale = case(1, 1, 1, 1, 2 * KEYS + 3, 8, 8, torch.float32)
    mask.zero_()
    for slot in (0, KEYS - 1, KEYS, 2 * KEYS + 2):
        key.zero_()
        key[0, 0, slot] = 1000 * query[0, 0, 0]
        assert torch.allclose(found(query, key, value, mask, scale)[0, 0, 0], value[0, 0, slot])


# Runs a few cases with a kernel compiled for another processor, or a broken one.
CHECK = """
import sys, torch
from skinny_kernels import attention_kernel, attention_vectors
from skinny_kernels.vectors import processor
numba = attention_kernel.numba
numba.cfunc = lambda kind, cache=True, cfunc=numba.cfunc: cfunc(kind)
{fault}
sys.path.insert(0, {tests!r})
from test_few_queries import DTYPES, case, right
wrong = 0
for dtype in DTYPES:
    for group, tokens in ((1, 1), (3, 1), (3, 8), (4, 16), (7, 40)):
        for before, size in ((0, 64), (120, 20), (400, 33)):
            wrong += not right(*case(1, 2, group, tokens, before + tokens, size, size, dtype))
print(processor().lanes, wrong)
"""
FAULTS = {
    "mask": "softmax = attention_vectors.AttentionEmitter.softmax\n"
    "attention_vectors.AttentionEmitter.softmax = lambda self, masked: softmax(self, False)",
    "blocks": "attention_vectors.AttentionEmitter.exponential = lambda self, x: self.splat(1.0)",
    "tail": "attention_vectors.TILES = {16: (3, 3, 3), 8: (3, 3, 3)}\n"
    "loop = attention_vectors.Emitter.loop\n"
    "attention_vectors.Emitter.loop = lambda self, begin, end, step, values, body: values "
    "if step == 1 and len(values) == 1 and values[0].type == attention_vectors.I64 "
    "else loop(self, begin, end, step, values, body)",
}
NARROWER = {
    "AVX2": ("haswell", "+avx2,+fma,+f16c,+bmi,+bmi2", 8),
    "AVX-512": ("skylake-avx512", "+avx2,+fma,+f16c,+avx512f,+avx512vl,+avx512bw,+avx512dq", 16),
}


def in_another_process(fault="", **env):
    tests = os.path.dirname(__file__)
    script = CHECK.format(fault=fault, tests=tests)
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | env
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.slow  # kernels are compiled anew
@pytest.mark.parametrize("name", NARROWER)
def test_narrower_vectors(name):
    cpu, features, lanes = NARROWER[name]
    if {"AVX2": "avx2", "AVX-512": "avx512f"}[name] not in Path(
        "/proc/cpuinfo"
    ).read_text().split():
        pytest.skip("this processor does not run them")
    assert in_another_process(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=features) == f"{lanes} 0"


@pytest.mark.parametrize("fault", first_of(FAULTS))
def test_faults_show(fault):
    assert not in_another_process(FAULTS[fault]).endswith(" 0")


def test_code_for_arm():
    """Compiled by LLVM and not run."""
    import llvmlite.binding as llvm
    from llvmlite import ir

    from skinny_kernels.attention_vectors import AttentionEmitter

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = "aarch64-unknown-linux-gnu"
    emitter = AttentionEmitter(module, 4)
    for function in (emitter.sums(8, 3, 4), emitter.softmax(True), emitter.weighted()):
        function.linkage = "external"
    checked = llvm.parse_assembly(str(module))
    checked.verify()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu="neoverse-n1", opt=3)
    assert machine.emit_assembly(checked).count("fmla") >= 8 * 3
    assert machine.emit_object(checked)


def test_what_the_kernel_takes():
    query, key, value, mask, _ = case(1, 2, 3, 4, 20, 8, 8, torch.float32)
    assert attention.fits(query, key, value, mask)
    assert attention.fits(query[:, :, :1], key, value, mask)
    assert not attention.fits(query, key.double(), value, mask)
    assert not attention.fits(query, key.mT.contiguous().mT, value, mask)
    assert not attention.fits(query, key[:, :, :19], value[:, :, :19], mask)

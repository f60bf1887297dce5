"""The GPU's kernels for norms, gated MLPs and rotary embeddings in Triton's interpreter."""

import os

import pytest
import torch

pytest.importorskip("triton")
if not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from architectures import make
from models import plain, random_prompts
from skinny_kernels.gpu import elementwise_kernel, layers
from skinny_kernels.gpu.adjacent import JointProduct, move
from skinny_kernels.gpu.layers import cover
from skinny_kernels.shadow import replacement, shadow_of
from token_recycling import TokenRecycling

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
DTYPES = [torch.float32, torch.float16]  # the interpreter has no bfloat16
if DEVICE.type == "cuda":
    DTYPES.append(torch.bfloat16)


def random(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(found, right, dtype, roundings=2):
    limit = roundings * torch.finfo(dtype).eps * float(right.abs().max())
    return float((found.double() - right.double()).abs().max()) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 576), (2, 3, 64), (1, 5, 2, 128), (1, 2, 4096)])
def test_norms(shape, added, dtype):
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    found = elementwise_kernel.rms_norm(x, weight, 1e-5, added)
    wide = x.double()
    right = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert close(found, right * (weight.double() + added), dtype)
    assert not close(elementwise_kernel.rms_norm(x, weight, 1e-1, added), found, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv", "size"), [(4, 2, 64), (9, 3, 64), (2, 2, 96)])
def test_rotary_embeddings(heads, kv, size, dtype):
    # As model code has them: views of [B, n, heads, size]
    query = random(2, 5, heads, size, dtype=dtype).transpose(1, 2)
    key = random(2, 5, kv, size, dtype=dtype, seed=1).transpose(1, 2)
    angles = random(2, 5, size // 2, dtype=torch.float32, seed=2)
    angles = torch.cat([angles, angles], dim=-1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotated(x):
        half = size // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos[:, None] + turned * sin[:, None]

    found = elementwise_kernel.rotary(query, key, cos, sin)
    assert [one.shape for one in found] == [query.shape, key.shape]
    for one, given in zip(found, (query, key)):
        if dtype == torch.float32:
            assert close(one, rotated(given), dtype)
        else:  # rounded at the same places
            assert torch.equal(one, rotated(given))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype):
    gate, up = random(2, 3, 1000, dtype=dtype), random(2, 3, 1000, dtype=dtype, seed=1)
    found = elementwise_kernel.gated(gate, up)
    assert close(found, torch.nn.functional.silu(gate.float()) * up.float(), dtype, 3)


def fused(model):
    """The shadow of a model, computed by the kernels."""
    shadow = shadow_of(model)
    cover(shadow)
    return shadow


@pytest.mark.parametrize("adjacent", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3"])
def test_a_model_computes_the_same_by_kernels(name, adjacent, monkeypatch):
    model = make(name).to(DEVICE).eval()
    if adjacent:
        move(model)
    ids = torch.tensor(random_prompts([9]), device=DEVICE)
    called = []
    for kernel in ("rms_norm", "add_rms_norm", "rotary", "gated"):
        own = getattr(elementwise_kernel, kernel)

        def counted(*args, own=own, kernel=kernel):
            called.append(kernel)
            return own(*args)

        monkeypatch.setattr(elementwise_kernel, kernel, counted)
    with torch.inference_mode():
        right = model(ids).logits
        shadow = fused(model)
        shadow(ids)  # layers are compared with their classes
        called.clear()
        outside = model(ids).logits
        assert not called
        found = shadow(ids).logits
    assert torch.equal(outside, right)
    assert close(found, right, torch.float32, 64)
    expected = {
        "llama": {"rms_norm", "add_rms_norm", "rotary", "gated"},
        "qwen3": {"rms_norm", "add_rms_norm", "rotary", "gated"},
        "gemma3": {"rms_norm", "rotary"},  # its MLPs take GELU
        "phi3": {"rms_norm"},  # one layer for gate and up, one for query, key and value
    }
    assert set(called) == expected[name]


@pytest.mark.parametrize("broken", [None, "rms_norm", "add_rms_norm", "rotary", "gated", "product"])
def test_the_text_of_a_recycler(broken, monkeypatch):
    """Each kernel that goes wrong after it was compared turns this red."""
    model, (prompt,) = make("llama").to(DEVICE).eval(), random_prompts([12])
    move(model)
    expected = plain(model, prompt, 30)
    recycler = TokenRecycling(model, nodes=5, graph=False)
    recycler.target.shadow, recycler.target.recordings = fused(model), None
    with torch.inference_mode():
        recycler.target.shadow(torch.tensor([prompt], device=DEVICE))
    if broken == "product":
        output = JointProduct.output
        monkeypatch.setattr(JointProduct, "output", lambda self, n, x: output(self, min(n, 1), x))
    elif broken is not None:
        own = getattr(elementwise_kernel, broken)
        turned = {
            "rms_norm": lambda x, weight, epsilon, added: own(x.sin(), weight, epsilon, added),
            "add_rms_norm": lambda x, residual, *norm: own(x, residual.sin(), *norm),
            "rotary": lambda query, key, cos, sin: own(query, key, sin, cos),
            "gated": lambda gate, up: own(up, gate),
        }
        monkeypatch.setattr(elementwise_kernel, broken, turned[broken])
    answers = [recycler.generate(prompt, max_new_tokens=30) for _ in range(2)]
    assert ([one.token_ids for one in answers] == [expected] * 2) == (broken is None)


def test_sums_computed_with_norms_have_the_same_bits(monkeypatch):
    """As sums and norms one after the other: every result is rounded where it was."""
    for dtype in DTYPES[:2]:
        model = make("llama").to(DEVICE, dtype).eval()
        ids = torch.tensor(random_prompts([9]), device=DEVICE)
        with torch.inference_mode(), monkeypatch.context() as patch:
            shadow = fused(model)
            shadow(ids)
            found = shadow(ids).logits
            patch.setattr(layers, "following_norms", lambda shadow: [])
            assert torch.equal(found, fused(model)(ids).logits)


@pytest.mark.parametrize("fault", ["sum", "norm"])
def test_wrong_sums_are_not_used(monkeypatch, fault):
    """Layers are compared with their classes, and keep their own code if these differ."""
    model = make("llama").to(DEVICE).eval()
    ids = torch.tensor(random_prompts([9]), device=DEVICE)
    add = elementwise_kernel.add_rms_norm
    called = []

    def broken(x, residual, *norm):
        called.append(fault)
        total, normalised = add(x, residual, *norm)
        return (total + x, normalised) if fault == "sum" else (total, normalised + total)

    monkeypatch.setattr(elementwise_kernel, "add_rms_norm", broken)
    with torch.inference_mode():
        shadow = fused(model)
        shadow(ids)
        assert called
        called.clear()
        assert close(shadow(ids).logits, model(ids).logits, torch.float32, 64)
    assert not called


def test_what_computes_something_else_keeps_its_code(monkeypatch):
    """Each kernel, broken, is not used."""
    model = make("llama").to(DEVICE).eval()
    gated, norm = elementwise_kernel.gated, elementwise_kernel.rms_norm
    monkeypatch.setattr(elementwise_kernel, "gated", lambda a, b: gated(b, a))
    monkeypatch.setattr(elementwise_kernel, "rms_norm", lambda x, w, e, a=0.0: norm(x, w, 9.0, a))
    assert not any(map(replacement, fused(model).modules()))


def test_a_kernel_that_does_not_compile_is_one_warning(monkeypatch, caplog):
    def fails(*args):
        raise RuntimeError("PassManager::run failed\nmore")

    monkeypatch.setattr(elementwise_kernel, "rms_norm", fails)
    model = make("llama").to(DEVICE)
    fused(model)
    (record,) = caplog.records
    assert "layers are computed by PyTorch: PassManager::run failed" in record.message
    assert "\n" not in record.message


def test_gradients_use_the_model_s_code(monkeypatch):
    model = make("llama").to(DEVICE)
    shadow = fused(model)
    ids = torch.tensor([[3, 4, 5]], device=DEVICE)
    monkeypatch.setattr(layers, "_kernels", lambda: pytest.fail("a kernel was called"))
    assert shadow(ids).logits.shape[1] == 3

"""Layers on a CPU: norms, activations and rotary embeddings as kernels, steps as recordings."""

import copy
import inspect
import threading

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from architectures import make
from models import plain, random_prompts
from skinny_kernels import activations, capture, elementwise, known_forms, layers, replay, team
from skinny_kernels import recordings as recordings_module
from skinny_kernels.angles import Angles
from skinny_kernels.layers import cover
from skinny_kernels.sdpa import packed_attention
from skinny_kernels.shadow import replacement, shadow_of
from token_recycling import TokenRecycling
from token_recycling.drafting.draft import root_only
from token_recycling.drafting.templates import TreeShape, TreeTemplate
from token_recycling.model.probe import open_target, probe_changes
from token_recycling.model.target import TreeTarget

pytestmark = pytest.mark.skipif(
    not team.is_available(), reason="there is no team of threads on this machine"
)
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float16: 2**-10}
stock_rotary = inspect.unwrap(modeling_llama.apply_rotary_pos_emb)


def close(found, wanted, size=1.0):
    """Equal but for rounding of terms of this size."""
    rounding = ROUNDING[found.dtype]
    off = (found.float() - wanted.float()).abs()
    return found.dtype == wanted.dtype and bool(
        (off <= rounding * (wanted.float().abs() + size)).all()
    )


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    size=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from([(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)]),
)
@torch.inference_mode()
def test_norms(tokens, size, dtype, kind):
    cls, added = kind
    norm = cls(size).to(dtype)
    norm.weight.data = torch.randn(size).to(dtype)
    x = torch.randn(1, tokens, size).to(dtype)
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    found = elementwise.rms_norm(x, norm.weight, epsilon, added)
    assert close(found, norm(x))
    alone = elementwise.rms_norm(x[:, -1:].contiguous(), norm.weight, epsilon, added)
    assert torch.equal(alone[0, 0], found[0, -1])


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 70),
    size=st.integers(8, 600),  # of fewer, the variance may be mere rounding
    dtype=st.sampled_from(DTYPES),
    has_bias=st.booleans(),
    mean=st.sampled_from([0.0, 3.0]),
)
@torch.inference_mode()
def test_layer_norms(tokens, size, dtype, has_bias, mean):
    torch.manual_seed(size)
    model = torch.nn.Sequential(torch.nn.LayerNorm(size, bias=has_bias)).to(dtype)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(size))
    x = (torch.randn(1, tokens, size) + mean).to(dtype)
    shadow = fast(model)
    assert replacement(shadow[0]) is layers._layer_norm
    wanted = (
        copy.deepcopy(model).double()(x.double()).to(dtype)
    )  # PyTorch's own is off where the mean is large
    assert close(shadow(x), wanted, 8.0)
    assert torch.equal(shadow(x[:, -1:])[0, 0], shadow(x)[0, -1])


ACTIVATIONS = {
    activations.SILU: functional.silu,
    activations.GELU: functional.gelu,
    activations.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    activations.CAP: lambda x: 30 * (x / 30).tanh(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, dtype):
    numbers = [torch.linspace(-90, 90, 40001), torch.linspace(-1, 1, 801) ** 5]
    x = torch.cat([*numbers, torch.tensor([0.0, -0.0, 2e4, -2e4])]).to(dtype)
    found = elementwise.activate(x, activation, 30.0)
    wanted = ACTIVATIONS[activation](x.double()).to(dtype)
    relative = 2**-18 if activation == activations.CAP else 0  # it must not cancel near 0
    if relative:
        rounding = max(relative, ROUNDING[dtype])
        assert ((found - wanted).abs() <= rounding * wanted.abs()).all()
    assert close(found, wanted, 0.1)
    for at in (0, 17, 8191, 8192, len(x) - 1):  # wherever it lies, in a vector or behind them
        assert elementwise.activate(x[at : at + 1], activation, 30.0).equal(found[at : at + 1])
    assert elementwise.activate(x[:1] * torch.nan, activation, 30.0).isnan().all()


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (torch.nn.GELU(), True),
        (torch.nn.GELU(approximate="tanh"), True),
        (torch.nn.SiLU(), True),
        (transformers.activations.NewGELUActivation(), True),
        (torch.nn.ReLU(), False),
        (torch.nn.Identity(), False),
    ],
)
@torch.inference_mode()
def test_modules_of_activations(module, known):
    shadow = fast(torch.nn.Sequential(module))
    assert (replacement(shadow[0]) is layers._activation) == known
    x = torch.randn(1, 3, 90)
    assert close(shadow(x), module(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_in_parts(dtype):
    """Of which some numbers are rotated, and others are not."""
    whole = torch.randn(2, 5, 3, 24).to(dtype).transpose(1, 2)
    parts = whole[..., :7].contiguous(), whole[..., 7:10], whole[..., 10:]
    found = elementwise.joined(parts)
    assert found.is_contiguous()
    assert found.equal(whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_heads(dtype):
    """Of queries, whose heads and tokens change places, as in Gemma 3."""
    x, weight = torch.randn(2, 5, 3, 24).to(dtype), torch.randn(24).to(dtype)
    wanted = elementwise.rms_norm(x, weight, 1e-5)
    found = elementwise.rms_norm(x.transpose(1, 2), weight, 1e-5)
    assert found.is_contiguous()
    assert torch.equal(found.transpose(1, 2), wanted)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 20),
    half=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
)
@torch.inference_mode()
def test_rotary_embeddings(batch, heads, tokens, half, dtype, wide):
    query, key = (
        torch.randn(batch, tokens, n, 2 * half).to(dtype).transpose(1, 2) for n in (heads, 1)
    )
    angles = torch.randn(batch, tokens, half).repeat(1, 1, 2)
    of_angles = torch.float32 if wide else dtype  # as in OLMo 2
    cos, sin = angles.cos().to(of_angles), angles.sin().to(of_angles)
    wanted = stock_rotary(query, key, cos, sin)
    for found, one in zip(elementwise.rotary((query, key), cos, sin), wanted):
        assert close(found, one.to(dtype), float(query.abs().max()) + 1)


def fast(model):
    """The shadow of a model, computed by the kernels."""
    shadow = shadow_of(model)
    cover(shadow, packed_attention)
    return shadow


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_queries(dtype):
    query = torch.randn(2, 5, 6, 7).to(dtype).transpose(1, 2)
    packed = elementwise.packed_queries(query, 3, 16)
    wanted = torch.zeros(2, 3, 7, 16)
    wanted[..., :10] = query.float().view(2, 3, 2, 5, 7).permute(0, 1, 4, 2, 3).reshape(2, 3, 7, 10)
    assert torch.equal(packed, wanted)


class Norms(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.llama, self.gemma = LlamaRMSNorm(24), GemmaRMSNorm(24)
        self.other = torch.nn.LayerNorm(24, bias=False)


@torch.inference_mode()
def test_only_norms_of_a_known_form_are_replaced(monkeypatch):
    seen = []
    kernel = elementwise.rms_norm
    model = Norms()
    shadow = fast(model)
    monkeypatch.setattr(elementwise, "rms_norm", lambda *a: seen.append(a[3]) or kernel(*a))
    x = torch.randn(1, 3, 24)
    wanted = [norm(x) for norm in model.children()]
    assert not seen
    found = [norm(x) for norm in shadow.children()]
    assert seen == [0.0, 1.0]
    assert all(map(close, found, wanted))


class OddNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.01


def test_a_norm_that_computes_something_else_stays(monkeypatch):
    model = torch.nn.Sequential(OddNorm(16))
    x = torch.randn(1, 2, 16)
    with torch.inference_mode():
        assert torch.equal(fast(model)(x), OddNorm(16)(x))
    monkeypatch.setattr(known_forms, "is_same", lambda *a: True)  # the comparison finds it
    with torch.inference_mode():
        assert not torch.allclose(fast(torch.nn.Sequential(OddNorm(16)))(x), OddNorm(16)(x))


def mlp(act="silu"):
    from transformers import LlamaConfig

    options = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4}
    return LlamaMLP(LlamaConfig(hidden_act=act, **options)).eval()


@torch.inference_mode()
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "sigmoid"])
def test_gated_mlps(act):
    model = torch.nn.Sequential(mlp(act))
    x = torch.randn(1, 3, 24)
    wanted = model(x)
    shadow = fast(model)
    assert (replacement(shadow[0]) is layers._mlp) == (act not in ("relu", "sigmoid"))
    assert close(shadow(x), wanted)


@torch.inference_mode()
def test_hooks_of_layers_inside_an_mlp_are_called():
    model, seen = torch.nn.Sequential(mlp()), []
    model[0].up_proj.register_forward_hook(lambda *a: seen.append(a))
    shadow = fast(model)
    seen.clear()  # of the comparison
    with torch.inference_mode():
        shadow(torch.randn(1, 3, 24))
    assert len(seen) == 1


def drafts(*sizes):
    draws = torch.Generator().manual_seed(1)
    for size in sizes:
        if size == 1:
            yield root_only(torch.tensor([7]))
            continue
        shape = TreeShape(TreeTemplate.chain(size - 1), torch.device("cpu"))
        tokens = torch.randint(90, (1, size), generator=draws)
        yield shape.draft(tokens, torch.ones(1, size, dtype=torch.bool))


SIZES = (1, 4, 4, 1, 4, 1, 4, 4, 1, 1, 7, 4, 1, 7, 7, 7, 4)


def logits_of(target, prompt=40):
    """The logits of steps of several sizes, each of which commits a token or two."""
    assert probe_changes(target) is None
    with torch.inference_mode():
        target.prefill([list(range(1, prompt))])
        found = []
        for draft in drafts(*SIZES):
            found.append(target.verify(draft))
            target.commit(torch.tensor([[0, 1]])[:, : draft.size], [min(draft.size, 2)])
    return found


def target_of(name="llama", dtype=torch.float32):
    return TreeTarget(make(name, attn_implementation="sdpa").to(dtype))


def recordings(target):
    made = target.recordings.made.values()
    return [one for one in made if isinstance(one, replay.Recording)]


def same(found, wanted):
    return all(map(torch.equal, found, wanted))


@pytest.fixture
def wanted(monkeypatch):
    """``logits_of`` without recordings."""

    def compute(target):
        with monkeypatch.context() as patch:
            patch.setattr(capture.Capture, "as_recording", lambda *about: None)
            found = logits_of(target)
        target.recordings.made.clear()
        return found

    return compute


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_replay_has_the_bits_of_the_models_own_code(name, dtype, wanted):
    target = target_of(name, dtype)
    right = wanted(target)
    assert not recordings(target)
    for _ in range(2):
        assert same(logits_of(target), right)
    assert len(recordings(target)) == 3
    assert target.recordings.right


def faulty(fault, monkeypatch, target):
    """Break what is set at a replay."""
    recording, others = replay.Recording, torch.full((8,), 9)
    if fault in ("copy", "attention"):
        bind, elsewhere = recording._bind_cache, torch.zeros(2**20)

        def bind_elsewhere(self, cache):
            bind(self, cache)
            if fault == "copy":
                self._entries = self._entries * 0 + elsewhere.data_ptr()
            else:
                for at, _ in self._attentions:
                    self._fields[at + replay.kernels.KEY] = elsewhere.data_ptr()

        monkeypatch.setattr(recording, "_bind_cache", bind_elsewhere)
    elif fault == "mask":
        mask = replay.attention.draft_mask
        monkeypatch.setattr(replay.attention, "draft_mask", lambda *a: mask(*a) * 0)
    elif fault == "positions":
        at = Angles.at
        monkeypatch.setattr(Angles, "at", lambda self, positions: at(self, positions + 1))
    else:
        begun = recording.__init__

        def begin(self, *about):
            begun(self, *about)
            if fault == "tokens":
                at, _ = self._inputs[0]
                self._inputs[0], self._fields[at] = (at[:0], at[:0]), others.data_ptr()
            else:
                self._outputs = self._outputs[1:]

        monkeypatch.setattr(recording, "__init__", begin)
        target.recordings.made.clear()


FAULTS = ["copy", "attention", "mask", "positions", "tokens", "logits"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_set_at_a_replay_shows(fault, wanted, monkeypatch):
    target = target_of()
    right = wanted(target)
    for _ in range(2):
        assert same(logits_of(target), right)
    faulty(fault, monkeypatch, target)
    assert not same(logits_of(target), right)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_replay_is_compared(fault, wanted, monkeypatch):
    """So that the model's own code computes all steps if anything is not set."""
    target = target_of()
    right = wanted(target)
    faulty(fault, monkeypatch, target)
    for _ in range(2):
        assert same(logits_of(target), right)
    assert target.recordings.right is False


@pytest.mark.parametrize("change", ["in place", "sum", "value", "unread"])
def test_what_happens_between_two_layers_is_seen(change, wanted, monkeypatch):
    def touched(self, hidden, *args, **kwargs):
        output = torch.nn.Module.__call__(self, hidden, *args, **kwargs)
        if change == "in place":
            output += 0.5
        elif change == "sum":
            output = output + 0.5
        elif change == "value":
            output = output if output[0, 0, 0].item() > 0 else output[:]
        else:
            torch.arange(output.shape[1])
        return output

    monkeypatch.setattr(LlamaDecoderLayer, "__call__", touched)
    target = target_of()
    right = wanted(target)
    for _ in range(2):
        assert same(logits_of(target), right)
    assert len(recordings(target)) == (3 if change == "unread" else 0)


@pytest.mark.parametrize("change", ["in place", "sum"])
def test_unseen_changes_are_lost(change, wanted, monkeypatch):
    """The control of the test above."""
    watch = capture.Capture.__torch_function__

    def unseen(self, function, types, args=(), kwargs=None):
        known = self.noted.reason, list(self.noted.unknown)
        result = watch(self, function, types, args, kwargs)
        self.noted.reason, self.noted.unknown = known
        return result

    monkeypatch.setattr(capture.Capture, "__torch_function__", unseen)
    monkeypatch.setattr(recordings_module, "as_bits", lambda tensor: torch.zeros(1))
    with pytest.raises(AssertionError):
        test_what_happens_between_two_layers_is_seen(change, wanted, monkeypatch)


def test_memory_is_given_out_again():
    """What the last tensor in it has left, also of a view."""
    scratch = capture.Scratch()
    first = scratch.empty((3, 5), torch.float32)
    address, view = first.data_ptr(), first.view(-1)[2:]
    del first
    assert scratch.empty((15,), torch.float32).data_ptr() != address
    del view
    assert scratch.empty((30,), torch.bfloat16).data_ptr() == address
    old = scratch.empty((15,), torch.float32)
    scratch.rewind()
    new = [scratch.empty((15,), torch.float32) for _ in range(3)]
    del old
    new.append(scratch.empty((15,), torch.float32))
    assert len({one.data_ptr() for one in new}) == 4
    large = scratch.empty((capture.CHUNK,), torch.float32)
    assert large.data_ptr() % capture.ALIGNED == 0


@pytest.mark.parametrize("by_position", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_angles(dtype, by_position):
    calls = []

    def compute(positions):
        calls.append(positions.shape)
        angles = positions[..., None] * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    frequencies = torch.linspace(0.1, 1, 6)
    angles = Angles(compute, by_position, [frequencies.numpy()])
    for positions in ([[40]], [[41, 43, 42]], [[700], [30]], [[705], [31]], [[9000], [2]]):
        asked = torch.tensor(positions)
        wanted = compute(asked)
        for found, one in zip(angles.at(asked), wanted):
            assert torch.from_numpy(found).view(dtype).equal(one)
    assert len(calls) == 5 + (3 if by_position else 5)
    frequencies *= 2
    for found, one in zip(angles.at(asked), compute(asked)):
        assert torch.from_numpy(found).view(dtype).equal(one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_and_operations_with_a_number(dtype):
    table, ids = torch.randn(50, 9).to(dtype), torch.tensor([[3, 49, 0], [3, 7, 1]])
    assert elementwise.embed(ids, table[:, :7]).equal(table[ids][..., :7])
    x = torch.randn(2, 3, 20).to(dtype)
    number = torch.tensor(0.3, dtype=dtype)
    assert elementwise.multiply(x, 0.3).equal(x * 0.3)
    assert elementwise.multiply(x, number).equal(x * number)
    assert elementwise.divide(x, 13.0).equal(x / 13.0)


def test_tokens_that_the_model_does_not_have():
    target = target_of()
    logits_of(target)
    for token in (-1, target.model.config.vocab_size):
        with pytest.raises(IndexError):
            target.verify(root_only(torch.tensor([token])))


@pytest.mark.parametrize("change", ["written", "replaced", "module"])
def test_weights_that_change_between_answers(change, wanted):
    target = target_of()
    logits_of(target)
    assert recordings(target)
    layer = target.model.model.layers[1].self_attn
    with torch.no_grad():
        if change == "written":
            layer.q_proj.weight.mul_(2)
        elif change == "replaced":
            layer.q_proj.weight.data = 2 * layer.q_proj.weight.data
        else:
            layer.q_proj = copy.deepcopy(layer.q_proj)
            layer.q_proj.weight.mul_(2)
    other = TreeTarget(copy.deepcopy(target.model))
    assert same(logits_of(target), wanted(other))


class Adapter(torch.nn.Module):
    """As peft's: it can be switched off and on."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight = base, torch.nn.Parameter(torch.eye(base.out_features) * 2)
        self.on = False

    def forward(self, x):
        return self.base(x) @ self.weight if self.on else self.base(x)


def test_an_adapter_that_is_switched_on_later(wanted):
    target = target_of()
    layer = target.model.model.layers[0]
    layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
    before = logits_of(target)
    assert not recordings(target)
    layer.mlp.down_proj.on = True
    found = logits_of(target)
    assert same(found, wanted(target))
    assert not same(found, before)


def test_a_model_that_computes_more_is_not_recorded(wanted):
    target = target_of("olmo")  # its norms are PyTorch's
    right = wanted(target)
    assert same(logits_of(target), right)
    assert not recordings(target)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma", "gemma2", "gemma3", "qwen2", "qwen3", "phi3", "granite", "olmo2"),
        *("smollm3", "starcoder2", "stablelm"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_families_whose_steps_are_recorded(name, dtype, wanted):
    if name == "granite" and VERSION < (5, 12):
        pytest.skip("its layers return tuples in this release of Transformers")
    if name == "stablelm" and VERSION < (5, 12):
        pytest.skip("its configuration lacks a name in this release of Transformers")
    # The attention whose scores are capped, which is the default of new releases.
    options = {"attn_implementation": "eager"} if name == "gemma2" else {}
    model = make(name, **options).to(dtype)
    # Kernels round the tanh of logits otherwise than PyTorch, which computes it in ``wanted``.
    model.config.final_logit_softcapping = None
    target = TreeTarget(model)
    right = wanted(target)
    for _ in range(2):
        assert same(logits_of(target), right)
    assert len(recordings(target)) == len(set(SIZES))


def test_capped_logits():
    """As of Gemma 2."""
    model = make("gemma2", final_logit_softcapping=2.0, attn_implementation="eager")
    target = TreeTarget(model)
    with torch.inference_mode():
        wanted = target.model(torch.tensor([[*range(1, 40), 7]])).logits[0, -1]
    for _ in range(3):
        first, *_ = logits_of(target)
        assert (first[0, 0] - wanted).abs().max() < 1e-4
    assert 1.9 < wanted.abs().max() < 2
    assert len(recordings(target)) == 3


@pytest.mark.skipif(
    not transformers.Gemma2PreTrainedModel._supports_sdpa,
    reason="PyTorch's attention refuses caps in this release of Transformers",
)
def test_scores_that_pytorch_does_not_cap():
    model = make("gemma2", attn_implementation="sdpa", attn_logit_softcapping=0.1)
    target = TreeTarget(model)
    with torch.inference_mode():
        right = target.model(torch.tensor([[*range(1, 40), 7]])).logits[0, -1]
    first, *_ = logits_of(target)
    assert (first[0, 0] - right).abs().max() < 1e-4


def test_rare_sizes_are_filled_up(wanted):
    """To one that is recorded, since a recording takes as long as many steps; the bits are same."""
    target = target_of()
    draft = next(drafts(11))
    with torch.inference_mode():
        target.prefill([list(range(1, 40))])
        found, warm = [], []
        for _ in range(8):
            found.append(target.verify(draft))
            warm.append(target.is_warm)
        assert warm == [False] * 5 + [True] * 3
        sizes = [shape[1] for shape, _ in target.recordings.made]
        assert sizes == [16, 12]
        assert all(one.shape == found[0].shape for one in found)
        assert same(found, [found[0]] * 8)
        for size in (9, 5, 4, 3, 2):
            target.verify(next(drafts(size)))
        assert [shape[1] for shape, _ in target.recordings.made] == [16, 12, 2]


def test_the_probe_records_what_answers_replay():
    target = open_target(make("llama", attn_implementation="sdpa"))
    probed = dict(target.recordings.made)
    assert {tokens for (_, tokens), _ in probed} == {1, 8}
    assert target.recordings.right
    with torch.inference_mode():
        target.prefill([list(range(1, 40))])
        for draft in drafts(1, 2, 7):
            target.verify(draft)
    assert target.recordings.made == probed


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_probe_with_short_windows_leaves_nothing(name):
    assert not open_target(make(name)).recordings.made


def test_recordings_of_several_threads(wanted):
    target = target_of()
    right = wanted(target)
    twins = [copy.copy(target) for _ in range(3)]
    found = [None] * 3

    def run(n):
        twins[n].reset()
        found[n] = [logits_of(twins[n]) for _ in range(3)]

    running = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert all(same(some, right) for each in found for some in each)


def test_a_batch(wanted):
    """Rows of different lengths, in one recording."""
    model, prompts = make("llama", attn_implementation="sdpa"), random_prompts([30, 12, 50])
    recycler = TokenRecycling(model, nodes=5)
    for _ in range(2):
        answers = recycler.generate(prompts, max_new_tokens=40)
        assert [one.token_ids for one in answers] == [plain(model, one, 40) for one in prompts]
    assert recordings(recycler.target)


def test_layers_take_their_arguments_by_name():
    """As other code may call them, in our forwards and outside."""
    model = make("llama")
    recycler = TokenRecycling(model, nodes=4)
    inputs = torch.randn(1, 3, model.config.hidden_size)
    with torch.inference_mode():
        for one in (model, recycler.target.shadow):
            layer = one.model.layers[0]
            for module, name in (
                (one.lm_head, "input"),
                (layer.self_attn.q_proj, "input"),
                (layer.self_attn.k_proj, "input"),
                (layer.mlp, "x"),
                (layer.input_layernorm, "hidden_states"),
            ):
                assert module(**{name: inputs}).equal(module(inputs)), name
                with pytest.raises(TypeError):
                    module(**{name: inputs, "other": 1})

"""Twins of models: the same answers, bit for bit the same for any number of tokens and rows."""

import pytest
import torch
from transformers import (
    DynamicCache,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from skinny_kernels import linear, load_gguf, prepare, team, twins
from skinny_kernels.attention_kernel import KEYS
from skinny_kernels.errors import CheckpointError

pytestmark = pytest.mark.skipif(
    not team.is_available(), reason="there is no team of threads on this machine"
)
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {}),
}


def made(name, **options):
    cls, config, more = (MODELS | WINDOWS)[name]
    torch.manual_seed(0)
    model = cls(config(**SHAPE, **more, **options)).eval()
    with torch.no_grad():  # else all logits are nearly the same
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model


def ids(rows, tokens):
    draws = torch.Generator().manual_seed(rows + tokens)
    return torch.randint(3, SHAPE["vocab_size"], (rows, tokens), generator=draws)


@pytest.fixture
def calls(monkeypatch):
    """Products of the kernel."""
    seen = []
    kernel = linear.products
    monkeypatch.setattr(linear, "products", lambda *a, **k: seen.append(a) or kernel(*a, **k))
    return seen


# Whose layers see a part of the keys: right, but not always with the same bits.
WINDOWS = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 40}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": 40}),
}


@pytest.mark.parametrize("name", MODELS | WINDOWS)
@pytest.mark.parametrize("rows", [1, 2])
def test_generate_answers_as_before(name, rows, calls):
    """Prompts of more tokens than the kernels take, and of fewer, also padded ones."""
    model = made(name)
    twin = prepare(model)
    calls.clear()
    for tokens in (20, 200):
        prompt = ids(rows, tokens)
        seen = torch.ones_like(prompt)
        seen[0, : 3 * (rows - 1)] = 0
        given = {"attention_mask": seen, "max_new_tokens": 24, "do_sample": False}
        found = twin.generate(prompt, **given)
        assert calls
        calls.clear()
        assert torch.equal(found, model.generate(prompt, **given))
        assert not calls


def logits(twin, tokens, sizes):
    """The logits of tokens that are read so many at a time."""
    cache, found, begin = DynamicCache(config=twin.config), [], 0
    with torch.inference_mode():
        for size in sizes:
            part = tokens[:, begin : begin + size]
            found.append(twin(part, past_key_values=cache).logits)
            begin += size
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_has_the_same_bits_in_any_forward(name, dtype):
    """Beside other tokens and rows; where a block of keys begins in the middle of them, too."""
    twin = prepare(made(name).to(dtype))
    tokens = ids(2, KEYS + 12)
    sizes = [KEYS - 20] + 32 * [1]
    whole = logits(twin, tokens, sizes)
    for others in ([KEYS - 20, 32], [KEYS - 20, 3, 5, 8, 16]):
        assert torch.equal(logits(twin, tokens, others), whole)
    for row in range(2):
        assert torch.equal(logits(twin, tokens[row : row + 1], sizes), whole[row : row + 1])
    assert not torch.equal(whole[:, -1], whole[:, -2])


def test_without_blocks_the_bits_differ(monkeypatch):
    """The control: all keys of the tokens in the block of the first of them."""
    monkeypatch.setattr(twins, "_parts", lambda tokens, slots: [(slice(0, tokens), slots - tokens)])
    twin, tokens = prepare(made("llama")), ids(2, KEYS + 12)
    whole = logits(twin, tokens, [KEYS - 20] + 32 * [1])
    assert not torch.equal(logits(twin, tokens, [KEYS - 20, 32]), whole)


def test_the_model_stays_as_it_is():
    model = made("llama")
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    kept = model.config.to_dict(), model.config._attn_implementation
    twin = prepare(model)
    twin.generate(ids(1, 5), max_new_tokens=3)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before
    assert (model.config.to_dict(), model.config._attn_implementation) == kept
    pairs = zip(twin.parameters(), model.parameters())
    assert all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)


def test_gradients_go_the_ordinary_way(calls):
    model = made("llama")
    twin = prepare(model)
    calls.clear()
    with torch.enable_grad():
        twin(ids(1, 5))
    assert not calls


def test_a_model_on_another_device_is_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    with pytest.raises(ValueError, match=r"the model is on meta; the kernels need the CPU"):
        prepare(model)


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    with pytest.raises(CheckpointError, match="cannot read"):
        load_gguf(file)
    file.write_bytes(b"GGML and more")
    with pytest.raises(CheckpointError, match="it is not a GGUF file"):
        load_gguf(file)


def difference(model, twin, *arguments, **options):
    with torch.inference_mode():
        found, right = (one(*arguments, **options).logits for one in (twin, model))
    return float((found - right).abs().max() / right.abs().max())


def masks(tokens):
    """Masks of a caller's own, [1 or 2, 1, tokens, tokens]."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    additive = torch.zeros(1, 1, tokens, tokens).masked_fill(~seen, -1e30)
    return {
        "bool": seen.expand(2, 1, tokens, tokens),
        "of one row": additive,
        "of all": torch.zeros(2, 1, tokens, tokens),
        "nothing seen": additive.masked_fill(~seen, float("-inf")).expand(2, 1, tokens, tokens),
    }


@pytest.mark.parametrize("name", masks(2))
def test_masks_of_the_callers_own(name):
    model, mask = made("llama"), masks(20)[name]
    assert difference(model, prepare(model), ids(2, 20), attention_mask=mask) < 1e-4
    assert not vars(mask)


def test_a_mask_that_is_changed_in_place():
    model, mask = made("llama"), masks(20)["of one row"].clone()
    twin = prepare(model)
    difference(model, twin, ids(1, 20), attention_mask=mask)
    mask[..., 10:, :9] = -1e30
    assert difference(model, twin, ids(1, 20), attention_mask=mask) < 1e-4


@pytest.mark.parametrize("option", [{"is_causal": False}, {"use_cache": False}])
def test_options_of_a_forward(option):
    model = made("llama")
    assert difference(model, prepare(model), ids(1, 20), **option) < 1e-4


def test_activations_of_single_layers():
    model = made("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    assert difference(model, prepare(model), ids(1, 20)) < 1e-4


class Limited(torch.nn.Module):
    """A gated MLP that limits what is large."""

    def __init__(self, size):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            torch.nn.Linear(size, size, bias=False) for _ in range(3)
        )
        self.act_fn = torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10)) * self.up_proj(x))


def test_an_mlp_that_limits_what_is_large():
    model = made("llama")
    for layer in model.model.layers:
        layer.mlp = Limited(SHAPE["hidden_size"])
        layer.mlp.gate_proj.weight.data.mul_(100)
    assert difference(model, prepare(model), ids(1, 20)) < 1e-4


def test_hooks_of_single_projections():
    model = made("llama")
    twin = prepare(model)
    for one in (model, twin):
        layer = one.model.layers[0].self_attn.v_proj
        layer.register_forward_pre_hook(lambda layer, given: (given[0] * 2,))
    assert difference(model, twin, ids(1, 20)) < 1e-4


def test_attention_of_the_callers_own_keeps_its_name():
    """And so do families whose attention is not known."""

    class Own(type(made("llama").model.layers[0].self_attn)):
        pass

    model = made("llama")
    model.model.layers[0].self_attn.__class__ = Own
    assert prepare(model).config._attn_implementation == "sdpa"
    assert (
        prepare(made("llama", attn_implementation="eager")).config._attn_implementation == "eager"
    )
    assert prepare(made("llama")).config._attn_implementation == "skinny_kernels"


def test_dropout_in_training():
    model = made("llama", attention_dropout=0.9)
    twin = prepare(model).train()
    with torch.inference_mode():
        torch.manual_seed(0)
        first = twin(ids(1, 20)).logits
        assert not torch.equal(first, twin(ids(1, 20)).logits)

"""A widened checkpoint computes what the small model computes, at another shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import typer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from typer.testing import CliRunner

from models import plain, random_prompts
from token_recycling import BUNDLED_MODEL, TokenRecycling, TokenRecyclingError
from widen import SHAPES, Shape, main, widen

pytestmark = pytest.mark.slow

# Measured: 3e-5 at most, of logits that reach 16; the mistakes below make 0.26 or more.
TOLERANCE = 1e-4
TINY = dict(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
)
PROMPTS = ["Anna reads 15 pages a day.", "Once upon a time", "def add(a, b):"]


def bundled_like(**changes):
    """The bundled model's shape, changed."""
    sizes = dict(
        vocab_size=4096,
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=512,
        tie_word_embeddings=True,
    )
    return sizes | changes


BUNDLED_SHAPES = {
    "width": bundled_like(hidden_size=576),
    "heads": bundled_like(num_attention_heads=6, num_key_value_heads=6),
    "groups": bundled_like(hidden_size=256, num_attention_heads=8, num_key_value_heads=4),
    "raised kv": bundled_like(hidden_size=896, num_attention_heads=14, num_key_value_heads=2),
    "layers": bundled_like(num_hidden_layers=8),
    "inner": bundled_like(intermediate_size=1000),
    "vocabulary": bundled_like(hidden_size=195, vocab_size=5000),
    "untied": bundled_like(tie_word_embeddings=False),
    "head_dim 128": bundled_like(head_dim=128),
    "llama-1b, thin": SHAPES["llama-1b"]
    | dict(num_hidden_layers=7, intermediate_size=600)
    | dict(vocab_size=9000, hidden_size=512),
    "llama-7b, thin": SHAPES["llama-7b"]
    | dict(num_hidden_layers=7, intermediate_size=600)
    | dict(vocab_size=9000, hidden_size=512),
}
ALL = dict(
    vocab_size=500,
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=64,
)
# What the small one is, the shape asked for, and the (heads, key-value heads) that come of it.
TINY_SHAPES = {
    "all sizes": ({}, ALL, (8, 4)),
    "all sizes, tied": (
        dict(tie_word_embeddings=True),
        ALL | dict(tie_word_embeddings=True),
        (8, 4),
    ),
    "small tied alone": (dict(tie_word_embeddings=True), ALL, (8, 4)),
    "large tied alone": ({}, ALL | dict(tie_word_embeddings=True), (8, 4)),
    "a group as it is": ({}, TINY, (4, 2)),
    "larger groups": ({}, ALL | dict(num_key_value_heads=2), (8, 2)),
    "groups of one": ({}, ALL | dict(num_key_value_heads=8), (8, 8)),
    "three in twos": (
        dict(num_attention_heads=6, hidden_size=48),
        ALL | dict(num_attention_heads=8),
        (8, 4),
    ),
    "heads left over": ({}, ALL | dict(num_attention_heads=6, num_key_value_heads=3), (6, 3)),
    "one kv head for two": ({}, ALL | dict(num_attention_heads=4, num_key_value_heads=1), (4, 2)),
    "llama3 rope": (
        dict(
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
        ALL,
        (8, 4),
    ),
    "two spare dimensions": (
        {},
        ALL | dict(hidden_size=34, num_attention_heads=17, num_key_value_heads=1),
        (17, 17),
    ),
    "head_dim x 4": ({}, ALL | dict(head_dim=32), (8, 4)),
}


def tiny(folder, cls=LlamaForCausalLM, config=LlamaConfig, **changes):
    """Save a random model; a large eps and uneven norms, that neither can be forgotten."""
    torch.manual_seed(0)
    options = dict(initializer_range=0.3, rms_norm_eps=0.05, pad_token_id=0, eos_token_id=2)
    model = cls(config(**TINY | options | changes)).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def config_file(folder, sizes):
    path = folder / "asked.json"
    path.write_text(json.dumps(sizes))
    return path


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).eval()


def logits(model, ids):
    with torch.inference_mode():
        return model(ids).logits.float()


def same_function(small, large, ids):
    """Same logits and distribution; no token that the small one lacks is ever near the best."""
    known = small.config.vocab_size
    mine, others = logits(large, ids).split([known, large.config.vocab_size - known], dim=-1)
    expected = logits(small, ids)
    torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCE)
    shares = torch.cat((mine, others), dim=-1).softmax(-1)
    torch.testing.assert_close(shares[..., :known], expected.softmax(-1), rtol=0, atol=1e-5)
    if others.numel():
        assert others.max() < min(-50, expected.min())
        assert shares[..., known:].sum(-1).max() < 1e-20


@pytest.fixture(autouse=True)
def _tidy(tmp_path):
    """Pytest keeps what tests write; a gigabyte of checkpoints is not worth it."""
    yield
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.fixture(scope="module")
def small():
    return load(BUNDLED_MODEL)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))


@pytest.fixture(scope="module")
def ids(bundled, tokenizer):
    """A conversation, of which the bundled model wrote the second half, and random tokens."""
    question = [{"role": "user", "content": PROMPTS[0]}]
    known = bundled.model.config.vocab_size
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    text = prompt + plain(bundled.model, prompt, 48)
    return torch.tensor([text, *random_prompts([len(text)], vocabulary=known)])


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """The bundled model at the shape of SmolLM2-135M; half a gigabyte, removed at the end."""
    folder = tmp_path_factory.mktemp("widened") / "smollm"
    yield folder, widen("bundled", "smollm2-135m", folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("sizes", BUNDLED_SHAPES.values(), ids=BUNDLED_SHAPES)
def test_bundled_model_keeps_its_function(small, ids, sizes, tmp_path):
    made = widen(BUNDLED_MODEL, config_file(tmp_path, sizes), tmp_path / "out")
    large = load(tmp_path / "out")
    same_function(small, large, ids)
    assert made.parameters == large.num_parameters()
    assert made.bytes == 4 * made.parameters
    for prompt in ids.tolist():
        assert plain(large, prompt[:20], 12) == plain(small, prompt[:20], 12)


@pytest.mark.parametrize("options, sizes, heads", TINY_SHAPES.values(), ids=TINY_SHAPES)
def test_tiny_model_keeps_its_function(options, sizes, heads, tmp_path):
    small = load(tiny(tmp_path / "small", **options))
    widen(tmp_path / "small", config_file(tmp_path, sizes), tmp_path / "out")
    large = load(tmp_path / "out")
    config = large.config
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    same_function(small, large, torch.tensor(random_prompts([100, 100])))
    for prompt in random_prompts([1, 20]):
        assert plain(large, prompt, 40) == plain(small, prompt, 40)


def test_real_shape(small, smollm, ids, tokenizer):
    folder, made = smollm
    large = load(folder)
    asked = SHAPES["smollm2-135m"]
    assert {name: getattr(large.config, name) for name in asked} == asked
    assert made.parameters == large.num_parameters() == 134_515_008
    assert made.bytes == 4 * made.parameters
    assert made.differs == []
    same_function(small, large, ids)
    for prompt in PROMPTS:
        prompt = tokenizer(prompt)["input_ids"]
        assert plain(large, prompt, 16) == plain(small, prompt, 16)


def test_recycled_text_is_that_of_the_small_model(bundled, tmp_path):
    sizes = BUNDLED_SHAPES["llama-1b, thin"]
    widen("bundled", config_file(tmp_path, sizes), tmp_path / "out")
    large = TokenRecycling.from_pretrained(tmp_path / "out", device="cpu")
    chat = [{"role": "user", "content": PROMPTS[0]}]
    bundled.reset()
    mine, expected = (m.generate(chat, max_new_tokens=60, temperature=0) for m in (large, bundled))
    assert mine.text == expected.text
    assert mine.finish_reason == expected.finish_reason
    assert mine.stats.mat > 1.5


def spread_forgotten(model):
    """Contiguous dimensions, as if rope's frequencies were those of the small head."""
    config = model.config
    step = config.head_dim // TINY["head_dim"]
    order = torch.arange(config.head_dim).view(2, -1, step).permute(0, 2, 1).flatten()
    for layer in model.model.layers:
        for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
            weight.copy_(
                weight.view(-1, config.head_dim, config.hidden_size)[:, order].flatten(0, 1)
            )


def norms(model, change):
    for layer in model.model.layers:
        change(layer.input_layernorm)
        change(layer.post_attention_layernorm)
    change(model.model.norm)


def heads_shifted(model):
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        weight.copy_(weight.roll(model.config.head_dim, 0))
        weight = layer.self_attn.o_proj.weight
        weight.copy_(weight.roll(model.config.head_dim, 1))


def sharpness_forgotten(model):
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_((TINY["head_dim"] / model.config.head_dim) ** 0.5)


WIDER = (ALL["hidden_size"] / TINY["hidden_size"]) ** 0.5
MISTAKES = {
    "norm": lambda model: norms(model, lambda norm: norm.weight.mul_(WIDER)),
    "eps": lambda model: norms(model, lambda norm: setattr(norm, "variance_epsilon", 0.05)),
    "eps, constant": lambda model: norms(
        model, lambda norm: setattr(norm, "variance_epsilon", 0.05 / WIDER**2)
    ),
    "rope": spread_forgotten,
    "sharpness": sharpness_forgotten,
    "groups": heads_shifted,
    "silence": lambda model: model.get_output_embeddings().weight[96:].zero_(),
    "cancelling": lambda model: model.model.norm.weight[33].zero_(),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_every_part_is_needed(mistake, tmp_path):
    tied = dict(tie_word_embeddings=True)
    small = load(tiny(tmp_path / "small", **tied))
    widen(tmp_path / "small", config_file(tmp_path, ALL | tied), tmp_path / "out")
    large = load(tmp_path / "out")
    ids = torch.tensor(random_prompts([100, 100]))
    if mistake is None:
        same_function(small, large, ids)
        return
    with torch.no_grad():
        MISTAKES[mistake](large)
    with pytest.raises(AssertionError):
        same_function(small, large, ids)


def test_the_same_shape_leaves_every_weight_as_it_is(small, tmp_path):
    widen("bundled", config_file(tmp_path, bundled_like()), tmp_path / "out", dtype="float16")
    large = load(tmp_path / "out")
    assert large.config.rms_norm_eps == small.config.rms_norm_eps
    for name, weight in small.state_dict().items():
        assert torch.equal(large.state_dict()[name], weight), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(small, ids, dtype, tmp_path):
    sizes = BUNDLED_SHAPES["llama-7b, thin"] | dict(tie_word_embeddings=True)
    made = widen("bundled", config_file(tmp_path, sizes), tmp_path / "out", dtype=dtype)
    large = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"), dtype="auto").eval()
    assert large.dtype == getattr(torch, dtype)
    assert made.bytes == 2 * made.parameters
    found = logits(large, ids)
    assert found.isfinite().all()
    assert found[..., 4096:].max() < -50
    half = load(BUNDLED_MODEL, getattr(torch, dtype))
    noise = (logits(half, ids) - logits(small, ids)).abs().mean()
    assert (found[..., :4096] - logits(small, ids)).abs().mean() < 2 * noise
    assert max(plain(large, ids[0, :20].tolist(), 8)) < 4096


def test_the_checkpoint_is_whole(tokenizer, tmp_path):
    sizes = BUNDLED_SHAPES["raised kv"]
    made = widen("bundled", config_file(tmp_path, sizes), tmp_path / "out")
    assert made.differs == [
        "num_attention_heads 16 instead of 14",
        "num_key_value_heads 4 instead of 2",
    ]
    copied = AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    assert copied.get_vocab() == tokenizer.get_vocab()
    assert copied.chat_template == tokenizer.chat_template
    model = load(tmp_path / "out")
    assert model.generation_config.eos_token_id == 3
    assert model.config.widened == {
        "from": "bundled",
        "to": str(tmp_path / "asked.json"),
        "differs": made.differs,
    }
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]


def test_main(tmp_path):
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    asked = str(config_file(tmp_path, BUNDLED_SHAPES["raised kv"]))
    arguments = ["bundled", "--to", asked, str(tmp_path / "out"), "--dtype", "bfloat16"]
    app = typer.Typer()
    app.command()(main)
    written = CliRunner().invoke(app, arguments).output
    size = load(tmp_path / "out").num_parameters()
    assert written.splitlines() == [
        f"wrote {tmp_path / 'out'}: {size:,} parameters, {2 * size:,} bytes",
        f"differences from the shape of {asked}: num_attention_heads 16 instead of 14; "
        "num_key_value_heads 4 instead of 2",
    ]
    again = CliRunner().invoke(app, arguments).exception
    assert isinstance(again, TokenRecyclingError)
    assert "already exists" in str(again)


SMALLER = {
    "hidden_size": 31,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "head_dim": 4,
    "intermediate_size": 47,
    "vocab_size": 95,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        *(({name: size}, f"its {name} is {TINY[name]}") for name, size in SMALLER.items()),
        (dict(head_dim=12), "not a multiple of 8"),
        (dict(hidden_size=32, vocab_size=97), "hidden_size of 34 or more"),
        (dict(hidden_size=None), "missing or invalid hidden_size"),
        (dict(num_attention_heads=None), "missing or invalid num_attention_heads"),
        (dict(vocab_size="many"), "missing or invalid vocab_size"),
        (dict(num_hidden_layers=0), "missing or invalid num_hidden_layers"),
        (dict(num_attention_heads=97), "attention heads do not fit"),
    ],
)
def test_shape_that_cannot_be_used(changes, message, tmp_path):
    tiny(tmp_path / "small")
    with pytest.raises(TokenRecyclingError, match=message):
        widen(tmp_path / "small", config_file(tmp_path, ALL | changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["[]", "{", "{}"])
def test_file_that_is_no_config(text, tmp_path):
    (tmp_path / "asked.json").write_text(text)
    with pytest.raises(TokenRecyclingError, match=r"asked\.json"):
        widen("bundled", tmp_path / "asked.json", tmp_path / "out")


def test_shape_with_default_heads():
    left_out = ("head_dim", "num_key_value_heads")
    sizes = {name: size for name, size in ALL.items() if name not in left_out}
    shape = Shape.parse(sizes, "here")
    assert (shape.head_dim, shape.num_key_value_heads) == (12, 8)
    assert not shape.tie_word_embeddings


@pytest.mark.parametrize(
    "options",
    [
        dict(attention_bias=True),
        dict(mlp_bias=True),
        dict(cls=MistralForCausalLM, config=MistralConfig),
    ],
    ids=["attention bias", "mlp bias", "mistral"],
)
def test_small_model_that_is_not_a_plain_llama(options, tmp_path):
    tiny(tmp_path / "small", **options)
    with pytest.raises(TokenRecyclingError, match="not a plain Llama"):
        widen(tmp_path / "small", "smollm2-135m", tmp_path / "out")


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(rms_norm_eps=0.0), "rms_norm_eps above 0.0"),
        (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "dynamic RoPE"),
    ],
)
def test_small_model_that_cannot_be_widened_so(options, message, tmp_path):
    tiny(tmp_path / "small", **options)
    with pytest.raises(TokenRecyclingError, match=message):
        widen(tmp_path / "small", config_file(tmp_path, ALL), tmp_path / "out")


def test_other_bad_input(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for small, to, out, message in (
        ("bundled", "gpt-5", "out", "choose one of smollm2-135m, .* or a config.json"),
        ("bundled", "llama-1b", "full", "already exists"),
        ("bundled", "llama-1b", "full/file", "already exists"),
        ("bundled", "smollm2-135m", "none/out", "cannot write .*No such file"),
        (tmp_path / "none", "llama-1b", "out", "not a checkpoint folder"),
    ):
        with pytest.raises(TokenRecyclingError, match=message) as caught:
            widen(small, to, tmp_path / out)
        assert "\n" not in str(caught.value)
    with pytest.raises(TokenRecyclingError, match="choose one of float32, bfloat16, float16"):
        widen("bundled", "llama-1b", tmp_path / "out", dtype="int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_nothing_is_left_of_a_checkpoint_that_cannot_be_written(tmp_path):
    tiny(tmp_path / "small")
    (tmp_path / "small" / "model.safetensors").write_bytes(b"broken")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TokenRecyclingError, match="cannot load the model"):
        widen(tmp_path / "small", "smollm2-135m", Path(tmp_path / "out"))
    assert sorted(tmp_path.iterdir()) == before

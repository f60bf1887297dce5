"""Models whose weights stay in the block formats of their GGUF file."""

import json
import logging
import pickle

import gguf
import pytest
import torch
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from gguf_files import write_gguf
from models import random_prompts
from skinny_kernels import packed, team
from skinny_kernels.packed import PackedEmbedding, PackedLinear
from token_recycling import PlainDecodingWarning, TokenRecycling, enable
from token_recycling.checkpoint.load import load_checkpoint

pytestmark = pytest.mark.skipif(
    not team.is_available(), reason="there is no team of threads on this machine"
)
Type = gguf.GGMLQuantizationType
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES | {"head_dim": 128}),
    "mistral": MistralConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES),
}


@pytest.fixture(scope="module")
def file(bundled, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("packed") / "model.gguf", bundled.model, Type.Q4_1)


@pytest.fixture(scope="module")
def model(file):
    return load_checkpoint(file, "cpu")


def layers(model):
    return [one for one in model.modules() if isinstance(one, (PackedLinear, PackedEmbedding))]


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].double()


def off(found, right):
    """Return the error of logits, relative to their spread."""
    return float((found - right).pow(2).mean().sqrt() / right.std())


def test_all_weights_stay_packed(model):
    model, _ = model
    kept = layers(model)
    assert len(kept) == 7 * model.config.num_hidden_layers + 2
    assert {one.ggml_type for one in kept} == {Type.Q4_1}
    assert model.dtype == torch.float32
    assert all(parameter.dtype != torch.float16 for parameter in model.parameters())


def test_without_huge_pages(file, model, monkeypatch):
    monkeypatch.setattr("skinny_kernels.gguf_model.has_huge_pages", lambda: False)
    same, _ = load_checkpoint(file, "cpu")
    (ids,) = random_prompts([10])
    assert torch.equal(logits(same, ids), logits(model[0], ids))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_dequantised_weights(name, kind, tmp_path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = ARCHITECTURES[name]
    made = AutoModelForCausalLM.from_config(config).eval()
    for parameter in made.parameters():
        parameter.data.normal_(std=0.05 if parameter.dim() > 1 else 0.5)
    architecture = "llama" if name == "mistral" else name.split(",")[0]
    path = write_gguf(tmp_path / "model.gguf", made, kind, architecture)
    found, tokenizer = load_checkpoint(path, "cpu")
    right, _ = load_checkpoint(path, "cpu", dequantize=True)
    assert len(layers(found)) == 7 * config.num_hidden_layers + 2
    assert not layers(right)
    assert type(found) is type(right)
    for ids in random_prompts([40, 200]):
        assert off(logits(found, ids), logits(right, ids)) < 0.03
    recycler = TokenRecycling(found, tokenizer, nodes=8)
    assert recycler.generate(ids, max_new_tokens=10).stats.steps


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 8, 15, 40, 64, None])
def test_texts_are_those_of_plain_decoding(model, nodes):
    model, tokenizer = model
    plain = TokenRecycling(model, tokenizer, drafter="none")
    options = {} if nodes is None else {"nodes": nodes}
    recycler = TokenRecycling(model, tokenizer, **options)
    accepted = 0
    for prompt in random_prompts([12, 33, 150]):
        right = plain.generate(prompt, max_new_tokens=60)
        found = recycler.generate(prompt, max_new_tokens=60)
        assert found.token_ids == right.token_ids
        accepted += found.stats.mat > 1
    assert accepted
    batch = random_prompts([5, 9, 20, 31])
    alone = [plain.generate(prompt, max_new_tokens=30).token_ids for prompt in batch]
    together = [one.token_ids for one in recycler.generate(batch, max_new_tokens=30)]
    assert together == alone


def test_generate_of_transformers(model):
    model, tokenizer = model
    (prompt,) = random_prompts([20])
    plain = TokenRecycling(model, tokenizer, drafter="none")
    ids = torch.tensor([prompt])
    expected = model.generate(ids, max_new_tokens=40, do_sample=False)[0, 20:].tolist()
    assert plain.generate(prompt, max_new_tokens=40).token_ids == expected
    with enable(model, tokenizer, nodes=7, strict=True):
        found = model.generate(ids, max_new_tokens=40, do_sample=False)
    assert found[0, 20:].tolist() == expected


def test_the_probe_sees_a_broken_layer(model, monkeypatch):
    model, tokenizer = model
    stock = packed.linear.products

    def broken(inputs, layers, **options):
        found = stock(inputs, layers, **options)
        if inputs.numel() // inputs.shape[-1] > 8:
            found[0].mul_(-1)
        return found

    monkeypatch.setattr(packed.linear, "products", broken)
    with pytest.warns(PlainDecodingWarning):
        TokenRecycling(model, tokenizer)


def test_mixed_types(bundled, tmp_path):
    """As files have it whose embeddings and norms are not quantised."""
    kinds = {"model.embed_tokens.weight": Type.F16, "model.layers.0.mlp.up_proj.weight": Type.Q8_0}
    path = write_gguf(tmp_path / "mixed.gguf", bundled.model, Type.Q4_0, kinds=kinds)
    model, _ = load_checkpoint(path, "cpu")
    table = model.get_input_embeddings()
    assert type(table) is torch.nn.Embedding
    right = bundled.model.get_input_embeddings().weight.half().float()
    assert torch.equal(table.weight, right)
    mlp = model.model.layers[0].mlp
    assert (mlp.up_proj.ggml_type, mlp.gate_proj.ggml_type) == (Type.Q8_0, Type.Q4_0)
    dense, _ = load_checkpoint(path, "cpu", dequantize=True)
    (ids,) = random_prompts([40])
    assert off(logits(model, ids), logits(dense, ids)) < 0.05


def test_what_cannot_stay_packed_is_said(bundled, tmp_path, caplog, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", bundled.model, Type.Q8_0)
    with caplog.at_level(logging.WARNING, "token_recycling"):
        model, _ = load_checkpoint(path, "cpu")
        assert layers(model)
        assert not caplog.messages
        monkeypatch.setattr("skinny_kernels.gguf_model.can_compute", lambda kind: False)
        model, _ = load_checkpoint(path, "cpu")
    assert not layers(model)
    (message,) = caplog.messages
    assert "no kernel of this processor reads Q8_0" in message
    assert "4 bytes for every weight" in message


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dequantize": True}])
def test_other_requests_dequantise(file, options):
    model, _ = load_checkpoint(file, "cpu", **options)
    assert not layers(model)


def test_on_the_command_line(file):
    """Packed unless it is to be dequantised; texts may differ."""
    from command import call

    ids = []
    for options in ([], ["--drafter", "none"], ["--dequantize"]):
        command = ("-m", file, "Once upon a time", "-n", 20, "--raw", "--json", *options)
        code, out, err = call(*command)
        assert code == 0, err
        ids.append(json.loads(out)["token_ids"])
    assert ids[0] == ids[1]


def test_a_copy_computes_the_same(model):
    model, _ = model
    (ids,) = random_prompts([10])
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(copied, ids), logits(model, ids))


def test_a_file_of_another_shape(bundled, tmp_path):
    """One line says which tensor is wrong."""
    from token_recycling import TokenRecyclingError

    config = Qwen3Config(**SIZES)  # Transformers does not read the size of heads of this model
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(config)
    path = write_gguf(tmp_path / "model.gguf", made, Type.Q8_0, "qwen3")
    with pytest.raises(TokenRecyclingError, match=r"is \[\d+, \d+\] in the file, and \[\d+, \d+\]"):
        load_checkpoint(path, "cpu")


def test_it_cannot_be_saved(model, tmp_path):
    """Nothing loads what ``save_pretrained`` would write, so nothing is written."""
    with pytest.raises(ValueError, match="dequantize them"):
        model[0].save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()

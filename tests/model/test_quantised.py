"""Quantised weights: exact where only weights are, found out or near ties where activations are."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from token_recycling import PlainDecodingWarning, TokenRecycling
from token_recycling.bench.check import check, overall
from token_recycling.bench.prompts import DEMO
from token_recycling.checkpoint.load import BUNDLED_MODEL
from token_recycling.model.fallback import PlainTarget

pytestmark = pytest.mark.quantised


def torchao(kind):
    """A Transformers configuration for one of torchao's kinds."""
    from torchao import quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, kind)())


def bitsandbytes(**options):
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


WEIGHTS_ONLY = {
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "bitsandbytes nf4": lambda: bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    ),
}
ACTIVATIONS_TOO = {
    "torchao int8 dynamic": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes int8": lambda: bitsandbytes(load_in_8bit=True),
}


ROUNDING = 1e-3  # of float32 logits at most, from token by token to one forward


def load(config):
    """The bundled model, quantised; on the CPU."""
    return TokenRecycling.from_pretrained(
        BUNDLED_MODEL, dtype="float32", device_map="cpu", quantization_config=config
    )


def weights_differ(model):
    plain = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    return (model(ids).logits - plain(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize("kind", WEIGHTS_ONLY)
def test_quantised_weights_are_lossless(kind):
    recycler = load(WEIGHTS_ONLY[kind]())
    assert weights_differ(recycler.model)
    if "nf4" in kind and torch.cpu._is_avx512_bf16_supported():
        pytest.skip("bitsandbytes multiplies in bfloat16 on this processor, batches otherwise")
    assert not isinstance(recycler.target, PlainTarget)
    results = check(recycler, DEMO[::2], 80)
    # bitsandbytes has its own kernel for one row on some machines; it rounds as bfloat16 does.
    rounding = max(result.noise for result in results) < ROUNDING
    assert overall(results) in (("lossless",) if rounding else ("lossless", "near-tie"))
    assert recycler.stats.accepted > 0


@pytest.mark.parametrize("kind", ACTIVATIONS_TOO)
def test_quantised_activations_are_found_out(kind):
    """A row's numbers may depend on its company, in a tree and in stock batches alike.

    Whether they do is up to the kernels of the machine; where they do, the probe finds out.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recycler = load(ACTIVATIONS_TOO[kind]())
    said = [str(w.message) for w in caught if w.category is PlainDecodingWarning]
    assert weights_differ(recycler.model)
    if isinstance(recycler.target, PlainTarget):
        assert "logits in a tree differ" in said[0]
    else:
        assert not said
    assert overall(check(recycler, DEMO[:1], 20)) == "lossless"

"""Changes that somebody makes to a model after it was loaded, and a model to make them to.

Each takes the model and ``undo``, a list of functions that restore what belongs to the process.
``CHANGED_MODEL`` is another Llama checkpoint to make them to.
"""

from __future__ import annotations

import copy
import os
from functools import lru_cache, partial

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize, prune
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama as llama

from token_recycling import BUNDLED_MODEL

MODEL = os.environ.get("CHANGED_MODEL", BUNDLED_MODEL)


@lru_cache
def _loaded():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()


def fresh():
    """The bundled model, which nobody has changed."""
    return copy.deepcopy(_loaded())


@lru_cache
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = (
        "Once upon a time there was a",
        "def add(a, b):\n    return",
        "The little dog was very",
    )
    return [tokenizer(text).input_ids for text in texts]


VECTOR = torch.linspace(-1, 1, 4096).sin()


def vector(like, factor=4.0):
    return factor * VECTOR[: like.shape[-1]].to(like.dtype)


def tensor_of(out):
    return out[0] if isinstance(out, tuple) else out


def steer(module, args, out):
    tensor_of(out)[:, -1] += vector(tensor_of(out))
    return out


def steered_later(model, undo):
    """There before, with a coefficient of 0 (see ``prepared``)."""
    model.steering["coefficient"] = 4.0


def prepared(model, name):
    """Make what must be there before the model is loaded."""
    if name == "steered_later":
        model.steering = state = {"coefficient": 0.0}

        def hook(module, args, out):
            tensor_of(out)[:, -1] += vector(tensor_of(out), state["coefficient"])
            return out

        model.model.layers[1].register_forward_hook(hook)
    elif name in ("switched_module", "switched_buffer", "nested_config", "switched_global"):
        model.model.layers[1].mlp = Switched(model.model.layers[1].mlp, model.config)


SWITCH = {"on": False}


class Switched(nn.Module):
    """Mixes neighbouring tokens once it is switched on, in one of several ways."""

    def __init__(self, inner, config):
        super().__init__()
        self.inner, self.config, self.on = inner, config, False
        config.mixing = {"on": False}
        self.register_buffer("share", torch.zeros(()))

    def forward(self, x):
        out = self.inner(x)
        if self.on or self.config.mixing["on"] or SWITCH["on"]:
            return out + out.roll(1, dims=1)
        return out + self.share * out.roll(1, dims=1)


def switched_module(model, undo):
    model.model.layers[1].mlp.on = True


def switched_buffer(model, undo):
    model.model.layers[1].mlp.share.data.fill_(1)


def nested_config(model, undo):
    model.config.mixing["on"] = True


def switched_global(model, undo):
    SWITCH["on"] = True
    undo.append(lambda: SWITCH.update(on=False))


def hook_at_the_last(model, undo):
    model.model.layers[2].register_forward_hook(steer)


def hook_of_means(model, undo):
    def centre(module, args, out):
        return out - out.mean(dim=1, keepdim=True)

    model.model.layers[1].mlp.register_forward_hook(centre)


def pre_hook(model, undo):
    def shift(module, args):
        return (args[0] + args[0].roll(1, dims=1),)

    model.model.layers[1].mlp.register_forward_pre_hook(shift)


def hook_of_the_head(model, undo):
    model.lm_head.register_forward_hook(steer)


def forward_wrapped(model, undo):
    forward = model.forward

    def biased(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits[:, -1] += vector(out.logits)
        return out

    biased.__signature__ = __import__("inspect").signature(forward)
    model.forward = biased


def forward_of_a_layer(model, undo):
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + forward(x).mean(dim=1, keepdim=True)


class Mixing(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 8 * x.roll(1, dims=1)


def mixing_module(model, undo):
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)


def activation(model, undo):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Tanh()


def activation_of_one(model, undo):
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def variance_epsilon(model, undo):
    for module in model.modules():
        if isinstance(module, llama.LlamaRMSNorm):
            module.variance_epsilon = 0.5


def scaling(model, undo):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def is_causal(model, undo):
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def attention_scaling(model, undo):
    model.model.rotary_emb.attention_scaling = 0.5


def transposed(model, undo):
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.T


def expanded(model, undo):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data[:1].expand_as(weight)


def turned(model, undo):
    weight = model.model.layers[1].mlp.gate_proj.weight
    weight.data = weight.data.flip(0)


def sliced_norm(model, undo):
    weight = model.model.layers[0].input_layernorm.weight
    weight.data = torch.ones(2 * len(weight))[::2] * 0.3


def written(model, undo):
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1)


def another_weight(model, undo):
    layer = model.model.layers[1].self_attn.v_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def bias_added(model, undo):
    layer = model.model.layers[1].mlp.up_proj
    layer.bias = nn.Parameter(vector(layer.weight[:, 0]))


def buffer_registered(model, undo):
    model.model.layers[0].register_buffer("unused", torch.ones(3))
    model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq * 2)


def other_frequencies(model, undo):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def double(model, undo):
    model.double()


def half(model, undo):
    model.model.layers[0].mlp.half().float()


def layers_exchanged(model, undo):
    layers = model.model.layers
    layers[0].self_attn.layer_idx, layers[1].self_attn.layer_idx = 1, 0
    layers[0], layers[1] = layers[1], layers[0]


def layer_removed(model, undo):
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


def layer_added(model, undo):
    layer = copy.deepcopy(model.model.layers[0])
    layer.self_attn.layer_idx = len(model.model.layers)
    model.model.layers.append(layer)
    model.config.num_hidden_layers += 1


def head_replaced(model, undo):
    old = model.lm_head
    model.lm_head = nn.Linear(old.in_features, old.out_features, bias=True)
    model.lm_head.weight.data = old.weight.data.roll(1, dims=0)
    model.lm_head.bias.data.zero_()


def embedding_scaled(model, undo):
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * (1 + torch.arange(ids.shape[1])[None, :, None])

    model.model.embed_tokens.__class__ = Scaled


def pruned_norm(model, undo):
    prune.random_unstructured(model.model.layers[0].input_layernorm, "weight", 0.5)


def pruned_linear(model, undo):
    prune.l1_unstructured(model.model.layers[0].mlp.down_proj, "weight", 0.7)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def parametrised_norm(model, undo):
    parametrize.register_parametrization(model.model.norm, "weight", Halved())
    parametrize.register_parametrization(
        model.model.layers[0].post_attention_layernorm, "weight", Halved()
    )


def parametrised_linear(model, undo):
    parametrize.register_parametrization(model.model.layers[1].mlp.up_proj, "weight", Halved())


def quantised(model, undo):
    torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)
    model.eval()


def compiled(model, undo):
    model.forward = torch.compile(model.forward, backend="eager")


def layer_compiled(model, undo):
    layer = model.model.layers[0].mlp
    layer.forward = torch.compile(layer.forward, backend="eager")


def _replaced(owner, name, value, undo):
    before = getattr(owner, name)
    setattr(owner, name, value)
    undo.append(partial(setattr, owner, name, before))
    return before


def class_forward(model, undo):
    before = llama.LlamaMLP.forward
    _replaced(llama.LlamaMLP, "forward", lambda self, x: before(self, x) + x.roll(1, dims=1), undo)


def class_call(model, undo):
    before = llama.LlamaMLP.__call__

    def call(self, x):
        return before(self, x) + x.roll(1, dims=1)

    llama.LlamaMLP.__call__ = call
    undo.append(lambda: delattr(llama.LlamaMLP, "__call__"))


def rotary(model, undo):
    before = llama.apply_rotary_pos_emb
    _replaced(
        llama,
        "apply_rotary_pos_emb",
        lambda q, k, cos, sin, **o: before(q, k, cos, -sin, **o),
        undo,
    )


def silu(model, undo):
    _replaced(functional, "silu", lambda x, inplace=False: torch.tanh(x), undo)


def attention_function(model, undo):
    before = AttentionInterface._global_mapping["sdpa"]

    def mine(module, query, key, value, mask, **options):
        return before(module, query * 1.5, key, value, mask, **options)

    AttentionInterface.register("sdpa", mine)
    undo.append(lambda: AttentionInterface.register("sdpa", before))


def eager(model, undo):
    model.set_attn_implementation("eager")


def global_hook(model, undo):
    def mixing(module, args, out):
        if isinstance(module, llama.LlamaMLP):
            return out + out.roll(1, dims=1)
        return None

    undo.append(torch_module.register_module_forward_hook(mixing).remove)


def global_pre_hook(model, undo):
    def mixing(module, args):
        return (args[0].roll(1, dims=1),) if isinstance(module, llama.LlamaMLP) else None

    undo.append(torch_module.register_module_forward_pre_hook(mixing).remove)


def training_with_dropout(model, undo):
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.eval()
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, nn.Dropout(0.0)).train()


class Adapter(nn.Module):
    """As a low-rank adapter's."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(0.2 * torch.randn(base.in_features, 4, generator=generator))
        self.up = nn.Parameter(0.2 * torch.randn(4, base.out_features, generator=generator))

    def forward(self, x):
        return self.base(x) + x @ self.down @ self.up


def adapters(model, undo):
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.mlp.down_proj = Adapter(layer.mlp.down_proj)


CHANGES = (
    hook_at_the_last, steered_later, hook_of_means, pre_hook, hook_of_the_head, forward_wrapped,
    forward_of_a_layer, mixing_module, switched_module, switched_buffer, nested_config,
    switched_global, activation, activation_of_one, variance_epsilon, scaling, is_causal,
    attention_scaling, transposed, expanded, turned, sliced_norm, written, another_weight,
    bias_added, buffer_registered, other_frequencies, double, half, layers_exchanged,
    layer_removed, layer_added, head_replaced, embedding_scaled, pruned_norm, pruned_linear,
    parametrised_norm, parametrised_linear, quantised, compiled, layer_compiled, class_forward,
    class_call, rotary, silu, attention_function, eager, global_hook, global_pre_hook,
    training_with_dropout, adapters,
)  # fmt: skip
BY_NAME = {change.__name__: change for change in CHANGES}

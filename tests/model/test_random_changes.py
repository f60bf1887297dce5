"""Random changes of a loaded model at random moments, each compared with ``generate``.

``RANDOM_CHANGES`` is how many each seed makes; 6 seeds.
"""

import os
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers.models.llama import modeling_llama as llama

from model_changes import fresh, prompts
from token_recycling import enable
from token_recycling.errors import TokenRecyclingError
from token_recycling.model.fingerprint import Fingerprint

COUNT = int(os.environ.get("RANDOM_CHANGES", "50"))
TOKENS = 10


def mixings(rng):
    """A function of activations [B, q, d], most of which treat tokens differently."""
    scale = rng.choice([0.5, 2.0, 5.0])
    direction = torch.randn(4096, generator=torch.Generator().manual_seed(rng.randrange(99)))

    def last(x):
        x = x.clone()
        x[:, -1] += scale * direction[: x.shape[-1]].to(x.dtype)
        return x

    def first_of_many(x):
        return x if x.shape[1] == 1 else last(x)

    return rng.choice(
        [
            last,
            first_of_many,
            lambda x: x - x.mean(dim=1, keepdim=True),
            lambda x: x + scale * x.roll(1, dims=1),
            lambda x: x * (1 + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 3),
            lambda x: x + scale * x.cumsum(dim=1) / (1 + x.shape[1]),
            lambda x: x + scale * direction[: x.shape[-1]].to(x.dtype),  # all alike
            lambda x: x * scale,
            lambda x: x / (1e-3 + x.abs().amax(dim=(0, 1))),
        ]
    )


class Around(nn.Module):
    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        if isinstance(out, tuple):
            return self.change(out[0]), *out[1:]
        return self.change(out)


def changed(change, out):
    if isinstance(out, tuple):
        return change(out[0]), *out[1:]
    if isinstance(out, torch.Tensor):
        return change(out)
    out.logits = change(out.logits)
    return out


class Changes:
    """Makes changes; each returns what undoes it, or None."""

    def __init__(self, model, rng):
        self.model, self.rng = model, rng

    def module_of(self, *kinds):
        found = [m for m in self.model.modules() if isinstance(m, kinds or nn.Module)]
        return self.rng.choice(found)

    def computing(self):
        return self.module_of(nn.Linear, llama.LlamaMLP, llama.LlamaRMSNorm)

    def hook(self):
        change = mixings(self.rng)
        handle = self.rng.choice([self.computing(), self.model]).register_forward_hook(
            lambda module, args, out: changed(change, out)
        )
        return handle.remove

    def pre_hook(self):
        change = mixings(self.rng)
        handle = self.computing().register_forward_pre_hook(
            lambda module, args: (change(args[0]),) if args else None
        )
        return handle.remove

    def global_hook(self):
        change, kind = mixings(self.rng), self.rng.choice([llama.LlamaMLP, llama.LlamaRMSNorm])
        return torch_module.register_module_forward_hook(
            lambda module, args, out: changed(change, out) if isinstance(module, kind) else None
        ).remove

    def forward(self):
        module, change = self.computing(), mixings(self.rng)
        inner = module.forward
        module.forward = lambda *a, **k: changed(change, inner(*a, **k))
        return lambda: vars(module).pop("forward", None)

    def wrapped(self):
        parent = self.module_of(llama.LlamaDecoderLayer, llama.LlamaMLP, llama.LlamaAttention)
        name, child = self.rng.choice(list(parent._modules.items()))
        setattr(parent, name, Around(child, mixings(self.rng)))
        return lambda: setattr(parent, name, child)

    def class_forward(self):
        kind = self.rng.choice([llama.LlamaMLP, llama.LlamaRMSNorm, nn.Linear])
        change, inner = mixings(self.rng), kind.forward
        kind.forward = lambda self, x: change(inner(self, x))
        return lambda: setattr(kind, "forward", inner)

    def module_class(self):
        module, change = self.computing(), mixings(self.rng)
        kind = type(module)
        module.__class__ = type(
            "Other", (kind,), {"forward": lambda self, *a: changed(change, kind.forward(self, *a))}
        )
        return lambda: setattr(module, "__class__", kind)

    def attribute(self):
        owners = []
        for module in self.model.modules():
            for name, value in vars(module).items():
                if isinstance(value, float | bool) and name not in ("training", "call_super_init"):
                    owners.append((vars(module), name, value))
        own, name, value = self.rng.choice(owners)
        own[name] = not value if isinstance(value, bool) else value * self.rng.choice([0.1, 3.0])
        return lambda: own.__setitem__(name, value)

    def setting(self):
        values = vars(self.model.config)
        names = [n for n, v in values.items() if isinstance(v, float) and "range" not in n]
        name = self.rng.choice([*names, "_attn_implementation_internal"])
        value = values.get(name)
        values[name] = "eager" if isinstance(value, str) else value * 2
        return lambda: values.__setitem__(name, value)

    def tensor(self):
        parameter = self.rng.choice(list(self.model.parameters()))
        before = parameter.data
        parameter.data = self.rng.choice(
            [
                lambda x: x.flip(0),
                lambda x: x[:1].expand_as(x),
                lambda x: x.clone().t().contiguous().t() if x.dim() == 2 else 2 * x,
                lambda x: x.t() if x.dim() == 2 and x.shape[0] == x.shape[1] else -x,
                lambda x: x * 1.5,
                lambda x: x.double().float() * 0.9,
            ]
        )(before)
        return lambda: setattr(parameter, "data", before)

    def replaced(self):
        module = self.module_of(nn.Linear, llama.LlamaRMSNorm)
        before = module.weight
        module.weight = nn.Parameter(before.detach() * self.rng.choice([0.3, 1.0, 2.0]))
        return lambda: setattr(module, "weight", before)

    def buffer(self):
        rotary = self.model.model.rotary_emb
        before = rotary.inv_freq
        rotary.register_buffer("inv_freq", before * self.rng.choice([0.5, 2.0]), persistent=False)
        return lambda: rotary.register_buffer("inv_freq", before, persistent=False)

    def exchanged(self):
        first, second = self.rng.sample(list(self.model.model.layers), 2)
        first.mlp, second.mlp = second.mlp, first.mlp
        return lambda: (setattr(first, "mlp", second.mlp), setattr(second, "mlp", first.mlp))

    def activation(self):
        mlp = self.module_of(llama.LlamaMLP)
        before = mlp.act_fn
        mlp.act_fn = self.rng.choice(
            [nn.ReLU(), nn.Tanh(), nn.Sigmoid(), Around(before, mixings(self.rng))]
        )
        return lambda: setattr(mlp, "act_fn", before)

    def function(self):
        name = self.rng.choice(["apply_rotary_pos_emb", "rotate_half", "repeat_kv"])
        before = getattr(llama, name)
        setattr(llama, name, lambda *a, **k: _scaled(before(*a, **k)))
        return lambda: setattr(llama, name, before)


def _scaled(out):
    return tuple(0.7 * x for x in out) if isinstance(out, tuple) else 0.7 * out


CLASSES = [name for name, value in vars(Changes).items() if callable(value) and name[0] != "_"]
CLASSES = [name for name in CLASSES if name not in ("module_of", "computing")]


def outcome(call):
    torch.manual_seed(1)
    try:
        return call()
    except TokenRecyclingError as error:
        return f"refused: {error}"
    except Exception as error:
        return type(error)


def play(seed, count):
    """Make changes; return those after which some text was another one."""
    rng = random.Random(seed)
    model = fresh()
    changes, active, wrong = Changes(model, rng), [], []
    with enable(model) as enabled:
        stock = type(model).generate
        for number in range(count):
            name = rng.choice(CLASSES)
            undo = getattr(changes, name)()
            active.append(undo)
            for prompt in rng.sample(prompts(), rng.randint(1, 2)):
                ids = torch.tensor([prompt])
                options = {"max_new_tokens": TOKENS, "pad_token_id": 0, "do_sample": False}
                if rng.random() < 0.3:
                    options |= {"do_sample": True, "temperature": 0.8, "top_k": 0}
                options["attention_mask"] = torch.ones_like(ids)
                right = outcome(lambda: stock(model, ids, **options).tolist())  # noqa: B023
                found = outcome(lambda: model.generate(ids, **options).tolist())  # noqa: B023
                if found != right:
                    wrong.append((number, name, enabled.recycler.target.refused))
                    break
                if not options["do_sample"] and isinstance(right, list):
                    answer = outcome(
                        lambda: (
                            enabled.recycler.generate(
                                prompt,  # noqa: B023
                                max_new_tokens=TOKENS,
                                keep_context=rng.random() < 0.5,
                            ).token_ids
                        )
                    )
                    if answer != right[0][len(prompt) :]:
                        wrong.append((number, name, "recycler.generate"))
                        break
            while active and (len(active) > 2 or isinstance(right, type) or rng.random() < 0.4):
                active.pop()()
    while active:
        active.pop()()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_text_is_silently_another(seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert play(seed, COUNT) == []


@pytest.mark.slow
def test_without_the_fingerprint_many_are(monkeypatch):
    """The control."""
    monkeypatch.setattr(Fingerprint, "change", lambda self: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(play(0, 20)) > 5
